"""The updates of a step: forward and backward passes, gradient clipping, and optimizer steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .checks import check_loss
from .compiler import spared
from .config import Settings
from .data.steps import Loaded
from .errors import UsageError
from .nested import map_tensors, to_device
from .networks import Networks
from .ranks.device import autocast
from .ranks.strategy import full_tensor, is_dtensor
from .ranks.world import World
from .run.clock import CLOCK
from .run.record import RECORDER


class Updater:
    """Updates the networks in a learner's `train_step`."""

    def __init__(self, networks: Networks, settings: Settings, world: World) -> None:
        self.networks, self.settings, self.world = networks, settings, world
        self.select = cache(partial(select, networks))

    def begin(self, batches: Sequence[Loaded], weight: int, measure_norm: bool) -> None:
        """Start a step.

        Args:
            batches: this rank's batches, as many as `accumulate`; they are moved to its device.
            weight: the sum of the weights of all ranks' batches.
            measure_norm: whether to record the gradient norm even without clipping.
        """
        device = self.world.device
        self.batches = [each._replace(batch=to_device(each.batch, device)) for each in batches]
        self.weight, self.measure_norm = weight, measure_norm

    def update(self, loss: Callable[[Any, Any], Tensor], *optimizers: str) -> None:
        """Compute the gradients of a loss on the step's batches, and step some optimizers.

        The loss is averaged over all batches and ranks, by the weights of the batches. Networks
        that these optimizers do not train get no gradients.

        Args:
            loss: takes the networks and a batch, and returns the mean loss of the batch, a tensor
                of shape ().
            optimizers: the names of the optimizers; without names, all of them.

        Raises:
            UsageError: the loss is not a scalar, there is no such optimizer, or the loss does not
                depend on some of the parameters.
        """
        names = optimizers or tuple(self.networks.optimizers)
        label = "_".join(optimizers) + "_" if optimizers else ""
        selection = self.select(names)
        scale = self.world.size / self.weight if self.weight else 0.0
        with frozen(selection.others):
            for number, (batch, samples, weight) in enumerate(self.batches, 1):
                with ExitStack() as stack:
                    if not samples:  # a spare batch: its numbers must not be recorded again
                        stack.enter_context(RECORDER.apart())
                    for each in selection.trained:
                        # DDP averages the gradients over ranks only in the last backward pass.
                        if number < len(self.batches) and isinstance(each, DistributedDataParallel):
                            stack.enter_context(each.no_sync())
                        if not weight:
                            stack.callback(each.register_forward_hook(stop_gradient).remove)
                    with CLOCK.mark("forward"):
                        value = self._forward(loss, selection.networks, batch)
                    with CLOCK.mark("backward"):
                        self.networks.scaler.scale(value * (weight * scale)).backward()
                RECORDER.add(f"train/{label}loss", value, weight)
        scaler = self.networks.scaler
        for name in names:
            scaler.unscale_(self.networks.optimizers[name])
        if self.settings.clip_norm or self.measure_norm:
            gradients = [p.grad for p in selection.parameters if p.grad is not None]
            norm = full_tensor(nn.utils.get_total_norm(gradients))  # with FSDP, over all ranks
            if self.settings.clip_norm:
                nn.utils.clip_grads_with_norm_(selection.parameters, self.settings.clip_norm, norm)
            if not scaler.is_enabled() or norm.isfinite():
                RECORDER.add(f"train/{label}gradient_norm", norm, 1)
        for name in names:
            optimizer = self.networks.optimizers[name]
            with spared(type(optimizer)):
                scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.is_enabled() and self.world.is_main:
            RECORDER.add("train/skipped_steps", float(scaler.get_scale() < before), 1, "sum")
        for module in self.networks.modules.values():
            module.zero_grad()

    def _forward(self, loss: Callable[..., Tensor], networks: Any, batch: Any) -> Tensor:  # noqa: ANN401
        try:
            with autocast(self.world.device, self.settings.precision):
                return check_loss(loss(networks, batch))
        except RuntimeError as error:
            if "finished reduction in the prior iteration" not in str(error):
                raise
            raise UsageError(
                "some parameters did not contribute to the loss of the last step: use them, leave "
                "them out with --freeze, or set --find-unused-parameters, which is slower"
            ) from None


class Selection(NamedTuple):
    """The networks and parameters in an update.

    Attributes:
        networks: the argument of the loss.
        trained: the modules that the update trains, such as DistributedDataParallel.
        parameters: the parameters that the update trains.
        others: the parameters of other networks, which get no gradients.
    """

    networks: Any
    trained: list[nn.Module]
    parameters: list[nn.Parameter]
    others: list[nn.Parameter]


def select(networks: Networks, names: tuple[str, ...]) -> Selection:
    """Return what an update with some optimizers trains.

    Raises:
        UsageError: there is no optimizer of this name.
    """
    if unknown := set(names).difference(networks.optimizers):
        raise UsageError(
            f"train_step updates with '{unknown.pop()}', but optimizers in model.py returned "
            f"{', '.join(networks.optimizers)}: use one of these names"
        )
    groups = [group for name in names for group in networks.optimizers[name].param_groups]
    parameters = [parameter for group in groups for parameter in group["params"]]
    ids = {id(parameter) for parameter in parameters}
    called, trained, others = dict(networks.modules), [], []
    for name, module in networks.modules.items():
        if any(id(parameter) in ids for parameter in module.parameters()):
            called[name] = networks.wrapped[name]
            trained.append(called[name])
        else:
            # The loss calls the module itself, since DDP would wait for gradients. DTensors are not
            # frozen, since FSDP has noted which parameters need gradients. Their gradients are
            # dropped after the update.
            others += [p for p in module.parameters() if p.requires_grad and not is_dtensor(p)]
    return Selection(networks.view(called), trained, parameters, others)


@contextmanager
def frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Freeze parameters inside the context: they get no gradients."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def stop_gradient(_module: nn.Module, _inputs: Any, outputs: Any) -> None:  # noqa: ANN401
    """Set the gradient of a network's outputs to zero, for a batch without weight.

    Multiplying the loss by zero is not enough: its gradient may be nan.
    """
    map_tensors(lambda t: t.register_hook(torch.zeros_like) if t.requires_grad else None, outputs)
