"""Adds the best network to the trackers' model registry: `train --register-model NAME`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..engine import UsageError

if TYPE_CHECKING:
    from ..engine import Training


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of this plug-in."""

    register_model: str | None = None
    """name for the best network in the model registry, for trackers that have one"""


class Plugin:
    """Registers a network at the end of a run.

    Raises:
        UsageError: the name is not one that a registry takes.
    """

    def __init__(self, training: "Training") -> None:
        self.name = training.settings.register_model
        if set(self.name or "") & set("/:"):
            raise UsageError(f"register_model is {self.name!r}: use a name without / or :")

    def on_end(self, training: "Training", status: str, _error: BaseException | None) -> None:
        """Register the best network of a run that has finished."""
        if self.name and status == "finished" and training.world.is_main:
            learner = training.learner
            best = learner.load(training.checkpointing.run_dir, training.settings)
            example = learner.inputs(best.example(training.datasets.test, 4))
            trackers = training.logger.trackers
            trackers.call("log_model", best.networks, example, self.name, best.step)
