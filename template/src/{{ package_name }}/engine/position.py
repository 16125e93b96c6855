"""Where a training stands: what a checkpoint keeps of it besides tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from .config import Settings


@dataclasses.dataclass
class Position:
    """How far the training is, and how good it was at its best.

    Attributes:
        epoch, step: whole epochs, and optimizer steps, that are done.
        epoch_steps, consumed: steps, and samples of all ranks, within the epoch.
        validated_step: the step of the last validation.
        best_score, best_step: of the metric that decides the best checkpoint; None before the
            first validation.
        validations_since_best: how many were no better.
    """

    epoch: int = 0
    step: int = 0
    epoch_steps: int = 0
    consumed: int = 0
    validated_step: int = 0
    best_score: float | None = None
    best_step: int = 0
    validations_since_best: int = 0

    def advance(self, samples: int) -> None:
        """Count a step of so many samples of all ranks."""
        self.step += 1
        self.epoch_steps += 1
        self.consumed += samples

    def end_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch, self.epoch_steps, self.consumed = self.epoch + 1, 0, 0

    def judge(self, score: float, direction: Literal["min", "max"]) -> bool:
        """Take note of a validation's score; return whether it is the best so far."""
        self.validated_step = self.step
        before = self.best_score
        best = before is None or (score < before if direction == "min" else score > before)
        if best:
            self.best_score, self.best_step = score, self.step
        self.validations_since_best = 0 if best else self.validations_since_best + 1
        return best

    def progress(self, settings: Settings, samples: int | None, samples_per_step: int) -> float:
        """Return how much of the training is done, from 0 to 1, the same on any world size.

        Args:
            settings: say how long it is.
            samples: of an epoch, None where it is not known.
            samples_per_step: of all ranks.
        """
        shares = []
        if samples:
            steps = max(samples // samples_per_step, 1)
            in_epoch = min(self.consumed / (steps * samples_per_step), 1.0)
            shares.append((self.epoch + in_epoch) / settings.epochs)
        if settings.max_steps:
            shares.append(self.step / settings.max_steps)
        return max(shares)

    def is_last_step(self, settings: Settings) -> bool:
        """Return whether max_steps have been taken."""
        return settings.max_steps is not None and self.step >= settings.max_steps

    def is_end(self, settings: Settings) -> bool:
        """Return whether nothing is left to train."""
        return (
            self.epoch >= settings.epochs
            or self.is_last_step(settings)
            or self.is_out_of_patience(settings)
        )

    def is_out_of_patience(self, settings: Settings) -> bool:
        """Return whether too many validations in a row were no better."""
        return settings.patience is not None and self.validations_since_best >= settings.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_state_dict(cls, values: Mapping[str, Any]) -> "Position":
        """Return the position that `state_dict` returned the values of.

        Raises:
            TypeError: they are others, or one is no number.
        """
        for name, value in values.items():
            if not isinstance(value, int | float | None):
                raise TypeError(f"{name} is a {type(value).__name__}")
        return cls(**values)


def is_due(every: int, number: int) -> bool:
    """Return whether a step or an epoch is one of those to come every so often; 0 means none."""
    return every > 0 and number > 0 and number % every == 0
