"""The updates of a step: forward and backward passes, clipping, the optimizers' steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..config import Settings
from ..errors import UsageError
from ..loading.steps import Loaded
from ..nested import to_device
from ..output.metrics import Meter
from ..ranks.device import autocast
from ..ranks.dtensor import is_dtensor
from ..ranks.strategy import clip_gradients
from ..ranks.world import World
from .checks import checked_loss
from .networks import Networks


class Loop:
    """What a learner's `train_step` updates its networks with.

    Args:
        networks: and their optimizers.
        settings, world: as everywhere.
        meter: gets the losses and the norms of the gradients.
        before_step: called before the optimizers step, while there are gradients.
    """

    def __init__(
        self,
        networks: Networks,
        settings: Settings,
        world: World,
        meter: Meter,
        before_step: Callable[[], None],
    ) -> None:
        self.networks, self.settings, self.world = networks, settings, world
        self.meter, self.before_step = meter, before_step
        self._selections: dict[tuple[str, ...], _Selection] = {}
        self.batches: Sequence[Loaded] = ()

    def begin(self, batches: Sequence[Loaded], weight: int, measure_norm: bool) -> None:
        """Start a step.

        Args:
            batches: this rank's, one for each of `accumulate`; they are put on its device.
            weight: of all ranks' batches together.
            measure_norm: whether the norm of the gradient is wanted, also without clipping.
        """
        self.batches = [
            each._replace(batch=to_device(each.batch, self.world.device)) for each in batches
        ]
        self.weight, self.measure_norm = weight, measure_norm

    def update(self, loss: Callable[[Any, Any], Tensor], *optimizers: str) -> None:
        """Take a step of some optimizers along the gradient of a loss over the step's batches.

        The gradient is that of the mean over all batches and ranks. Networks that none of the
        optimizers trains are called as they are, and get no gradient.

        Args:
            loss: takes networks and a batch, and returns the mean loss of the batch, a scalar.
            optimizers: names of what `optimizers` returned; none: all of them.

        Raises:
            UsageError: the loss is no scalar, or some parameters have no part in it.
        """
        selected = self._select(optimizers)
        total = torch.zeros((), device=self.world.device)
        scale = self.world.size / self.weight if self.weight else 0.0
        with selected.others_frozen():
            for number, (batch, _, weight) in enumerate(self.batches, 1):
                with ExitStack() as stack:
                    if number < len(self.batches):
                        for each in selected.replicas:
                            stack.enter_context(each.no_sync())
                    value = self._forward(loss, selected, batch)
                    (value * (weight * scale)).backward()
                total += value.detach() * weight
        norm = None
        if self.settings.clip_norm or self.measure_norm:
            norm = clip_gradients(selected.parameters, self.settings.clip_norm)
        self.before_step()
        for name in selected.optimizers:
            self.networks.optimizers[name].step()
        self.networks.zero_grad()
        label = "_".join(optimizers) + "_" if optimizers else ""
        self.meter.add(label, total, sum(each.weight for each in self.batches), norm)

    def _forward(self, loss: Callable[..., Tensor], selected: "_Selection", batch: Any) -> Tensor:  # noqa: ANN401
        try:
            with autocast(self.world.device, self.settings.precision):
                value = loss(selected.networks, batch)
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise UsageError(
                "some parameters had no part in the loss of the last step: use them, keep them out "
                "with --freeze, or set --find-unused-parameters, which takes some time"
            ) from None
        return checked_loss(value)

    def _select(self, names: tuple[str, ...]) -> "_Selection":
        if names not in self._selections:
            for name in names:
                if name not in self.networks.optimizers:
                    raise UsageError(
                        f"train_step updates with '{name}', but optimizers in model.py returned "
                        f"{', '.join(self.networks.optimizers)}"
                    )
            self._selections[names] = _selection(
                self.networks, names or (*self.networks.optimizers,)
            )
        return self._selections[names]


@dataclass
class _Selection:
    """What an update by some optimizers concerns.

    Attributes:
        optimizers: their names; parameters: what they train.
        networks: as the loss gets them; replicas: those of them that average gradients by DDP.
        others: parameters of networks that they do not train.
    """

    optimizers: Sequence[str]
    parameters: list[nn.Parameter]
    networks: Any
    replicas: list[DistributedDataParallel]
    others: list[nn.Parameter]

    @contextmanager
    def others_frozen(self) -> Iterator[None]:
        """Compute no gradients for the other networks meanwhile."""
        for parameter in self.others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self.others:
                parameter.requires_grad_(True)


def _selection(networks: Networks, names: Sequence[str]) -> _Selection:
    groups = [g for name in names for g in networks.optimizers[name].param_groups]
    parameters = [each for group in groups for each in group["params"]]
    trained = {id(each) for each in parameters}
    called, others = {}, []
    for name, module in networks.modules.items():
        if any(id(each) in trained for each in module.parameters()):
            called[name] = networks.wrapped[name]
        else:
            # Not through DDP, which would wait for gradients.
            called[name] = module
            # FSDP has noted which parameters have gradients; they are dropped.
            others += [p for p in module.parameters() if p.requires_grad and not is_dtensor(p)]
    replicas = [each for each in called.values() if isinstance(each, DistributedDataParallel)]
    return _Selection(names, parameters, networks.view(called), replicas, others)
