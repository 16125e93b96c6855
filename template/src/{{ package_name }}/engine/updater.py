"""The updates of a step: forward and backward passes, clipping, the optimizers' steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .checks import check_loss
from .config import Settings
from .data.steps import Loaded
from .errors import UsageError
from .nested import map_tensors, to_device
from .networks import Networks
from .ranks.device import autocast
from .ranks.dtensor import is_dtensor
from .ranks.strategy import clip_gradients
from .ranks.world import World
from .run.meters import Meter
from .run.record import RECORDER


class Updater:
    """What a learner's `train_step` updates its networks with.

    Args:
        networks: and their optimizers.
        settings, world: as everywhere.
        meter: gets the losses.
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
        label = "_".join(optimizers) + "_" if optimizers else ""
        scale = self.world.size / self.weight if self.weight else 0.0
        with selected.others_frozen():
            for number, (batch, samples, weight) in enumerate(self.batches, 1):
                with ExitStack() as stack:
                    if not samples:  # a spare batch, which was recorded before
                        stack.enter_context(RECORDER.paused())
                    for each in selected.trained:
                        if number < len(self.batches) and isinstance(each, DistributedDataParallel):
                            stack.enter_context(each.no_sync())
                        if not weight:
                            stack.callback(each.register_forward_hook(_stop_gradient).remove)
                    value = self._forward(loss, selected, batch)
                    (value * (weight * scale)).backward()
                self.meter.add_loss(label, value, weight)
        if self.settings.clip_norm or self.measure_norm:
            norm = clip_gradients(selected.parameters, self.settings.clip_norm)
            RECORDER.add(f"train/{label}gradient_norm", norm, 1)
        self.before_step()
        for name in selected.optimizers:
            self.networks.optimizers[name].step()
        self.networks.zero_grad()

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
        return check_loss(value)

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
        networks: as the loss gets them; trained: those of them that the optimizers train.
        others: parameters of networks that they do not train.
    """

    optimizers: Sequence[str]
    parameters: list[nn.Parameter]
    networks: Any
    trained: list[nn.Module]
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
    ids = {id(each) for each in parameters}
    called: dict[str, nn.Module] = {}
    trained, others = [], []
    for name, module in networks.modules.items():
        if any(id(each) in ids for each in module.parameters()):
            called[name] = networks.wrapped[name]
            trained.append(called[name])
        else:
            # Not through DDP, which would wait for gradients.
            called[name] = module
            # FSDP has noted which parameters have gradients; they are dropped.
            others += [p for p in module.parameters() if p.requires_grad and not is_dtensor(p)]
    return _Selection(names, parameters, networks.view(called), trained, others)


def _stop_gradient(_module: nn.Module, _inputs: Any, outputs: Any) -> None:  # noqa: ANN401
    """Give a network a gradient of zero, where zero times that of the loss may be nan."""
    map_tensors(lambda t: t.register_hook(torch.zeros_like) if t.requires_grad else None, outputs)
