"""How far a training is: the counters in a checkpoint."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from .config import Settings


class Place(NamedTuple):
    """Where in a training a step is: its epoch, the steps before it, and the progress before it."""

    epoch: int
    step: int
    progress: float


@dataclasses.dataclass
class Position:
    """How far the training is, and how good its best validation was.

    Attributes:
        epoch, step: the numbers of complete epochs and steps.
        epoch_steps, consumed: the numbers of complete steps, and of samples that all ranks together
            have used, in the current epoch.
        validated_step: the step of the last validation, -1 before the first one.
        best_score, best_step: of the best validation; `best_score` is None before the first one.
        validations_since_best: the number of validations after the best one.
    """

    epoch: int = 0
    step: int = 0
    epoch_steps: int = 0
    consumed: int = 0
    validated_step: int = -1
    best_score: float | None = None
    best_step: int = 0
    validations_since_best: int = 0

    def advance(self, samples: int) -> None:
        """Count a step with this number of samples over all ranks."""
        self.step += 1
        self.epoch_steps += 1
        self.consumed += samples

    def end_epoch(self) -> None:
        """Count a complete epoch, and reset the counters of the current epoch."""
        self.epoch, self.epoch_steps, self.consumed = self.epoch + 1, 0, 0

    @property
    def is_validated(self) -> bool:
        """Whether the last validation was at this step."""
        return self.validated_step == self.step

    def judge(self, score: float, direction: Literal["min", "max"]) -> bool:
        """Record the score of a validation; return whether it is the best so far."""
        self.validated_step = self.step
        before = self.best_score
        best = before is None or (score < before if direction == "min" else score > before)
        if best:
            self.best_score, self.best_step = score, self.step
        self.validations_since_best = 0 if best else self.validations_since_best + 1
        return best

    def progress(self, settings: Settings, samples: int | None, samples_per_step: int) -> float:
        """Return how much of the training is done, from 0 to 1.

        The progress after a number of samples is the same with any world size.

        Args:
            samples: the number of samples in an epoch; None if unknown.
            samples_per_step: the number of samples in a step over all ranks.
        """
        progress = self.step / settings.max_steps if settings.max_steps else 0.0
        if samples:
            steps = max(samples // samples_per_step, 1)
            in_epoch = min(self.consumed / (steps * samples_per_step), 1.0)
            progress = max(progress, (self.epoch + in_epoch) / settings.epochs)
        return progress

    def is_end(self, settings: Settings) -> bool:
        """Return whether the training is complete."""
        steps = float("inf") if settings.max_steps is None else settings.max_steps
        ended = self.epoch >= settings.epochs or self.step >= steps
        return ended or self.is_out_of_patience(settings)

    def is_out_of_patience(self, settings: Settings) -> bool:
        """Return whether the last `patience` validations brought no new best score."""
        return settings.patience is not None and self.validations_since_best >= settings.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the counters by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state_dict(cls, values: Mapping[str, Any]) -> "Position":
        """Return the position from a `state_dict`.

        Raises:
            TypeError, ValueError: a counter is unknown, has the wrong type, or is out of range.
        """
        for name, value in values.items():
            if name == "best_score":
                right = value is None or (isinstance(value, int | float) and math.isfinite(value))
            else:
                lowest = -1 if name == "validated_step" else 0
                right = isinstance(value, int) and lowest <= value < 2**63
            if not right:
                raise ValueError(f"{name} is {value!r}")
        return cls(**values)


def is_due(every: int, number: int) -> bool:
    """Return whether `number` is a multiple of `every`; False if one of them is 0."""
    return every > 0 and number > 0 and number % every == 0
