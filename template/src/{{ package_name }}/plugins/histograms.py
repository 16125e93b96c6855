"""Sends histograms of parameters and gradients to the trackers: `train --histograms-every 100`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..engine import Count

if TYPE_CHECKING:
    from ..engine import Training


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of this plug-in."""

    histograms_every: Count = 0
    """optimizer steps between histograms of parameters and gradients; 0: none"""


class Plugin:
    """Shows the gradients when they are computed, before an optimizer takes its step."""

    def __init__(self, training: "Training") -> None:
        self.training, self.every = training, training.settings.histograms_every

    def on_start(self, training: "Training") -> None:
        """Begin to watch the optimizers."""
        for optimizer in training.networks.optimizers.values() if self.every else ():
            optimizer.register_step_pre_hook(self._show)

    def _show(self, *_: Any) -> None:  # noqa: ANN401 - an optimizer, and what it was called with
        from ..engine.networks import named_parameters
        from ..engine.ranks.strategy import full_tensor

        training, step = self.training, self.training.position.step + 1
        if step % self.every:
            return
        for name, parameter in named_parameters(training.networks.modules).items():
            for what, tensor in (("parameters", parameter), ("gradients", parameter.grad)):
                if tensor is not None:
                    values = full_tensor(tensor.detach())  # every rank calls this
                    training.logger.log_histogram(f"{what}/{name}", values, step)
