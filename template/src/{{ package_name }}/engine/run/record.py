"""Numbers that each rank records between two log lines, and their reduction over all ranks.

Call `record` where a number arises, such as in model.py:

    record("confidence", outputs.softmax(1).amax(1).mean(), weight=len(outputs))

In training this is the metric train/confidence, in an evaluation validation/confidence or
test/confidence. A tensor stays on its device until the line is logged, so that no step waits for
it. What a loading worker records is lost: it is another process.
"""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..errors import UsageError
from ..ranks.device import sum_dtype
from ..ranks.world import World

How = Literal["mean", "sum", "max"]
LOSS = re.compile(r"train/(\w+_)?loss")
# The names that the training loop and evaluations log.
TAKEN = re.compile(
    r"train/(lr(/.*)?|(data|slowest_hook)_seconds|\w+_per_second|mfu_percent"
    r"|(\w+_)?(loss|gradient_norm))|(validation|test)/.*"
)
NAME = re.compile(r"[\w.: -]+(/[\w.: -]+)*", re.ASCII)
Values = dict[str, tuple[How, Any, float]]
"""By name: how, the sum or the maximum (a float or a tensor), and the sum of weights."""


class Recorder:
    """What a rank has recorded since the last reading.

    Attributes:
        split: the name of the evaluation that is running, "" in training.
        of_ranks: what `read` got from each rank.
    """

    def __init__(self) -> None:
        self.values: Values = {}
        self.split = ""
        self.of_ranks: list[Values] = []

    def record(
        self, name: str, value: float | Tensor, how: How = "mean", weight: float = 1.0
    ) -> None:
        """Record a number.

        Args:
            name: of the metric; a name without a slash gets the split as its prefix.
            value: a number or a tensor of one.
            how: how steps and ranks are reduced: to their mean, sum or maximum.
            weight: of the value in a mean, such as its number of samples. With weight 0 the value
                does not count, even if it is nan.

        Raises:
            ValueError: the name is taken or not valid, the value is not one real number, or the
                weight is negative or not finite.
        """
        if self.split:
            name = f"{self.split}/{name.removeprefix('train/')}"
        elif "/" not in name:
            name = f"train/{name}"
        if not NAME.fullmatch(name):
            raise ValueError(f"can't record '{name}': use letters, digits and ' _-.:/' in the name")
        if not self.split and TAKEN.fullmatch(name):
            raise ValueError(f"can't record '{name}': the loop or an evaluation logs it; rename it")
        if how not in get_args(How) or self.values.get(name, (how,))[0] != how:
            raise ValueError(
                f"can't record '{name}' as '{how}': the same one of {', '.join(get_args(How))}"
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"can't record '{name}': {tuple(value.shape)} is not one number")
        if isinstance(value, Tensor) and value.is_complex():
            raise ValueError(f"can't record '{name}': {value.dtype} is not a real number")
        weight = float(weight) if how == "mean" else 1.0
        if not 0 <= weight < math.inf:
            raise ValueError(f"can't record '{name}' with weight {weight}: from 0 to finite")
        self.add(name, value, weight, how)

    def add(self, name: str, value: float | Tensor, weight: float, how: How = "mean") -> None:
        """Add a value, as `record` does, but under any name."""
        value = _exact(value)
        if how == "mean":
            # Not zero times the value, which may be nan.
            value = value * weight if weight else torch.zeros_like(value)
        if name in self.values:
            _, before, weights = self.values[name]
            before, weight = _exact(before).to(value), weights + weight
            value = torch.maximum(before, value) if how == "max" else before + value
        self.values[name] = (how, value, weight)

    @contextmanager
    def apart(self, split: str = "unused") -> Iterator[None]:
        """Record apart, such as for an evaluation; what is not read before the end is dropped."""
        before = self.values, self.split
        self.values, self.split = {}, split
        try:
            yield
        finally:
            self.values, self.split = before

    def state_dict(self) -> Values:
        """Return what this rank has."""
        return {name: (how, float(v), weight) for name, (how, v, weight) in self.values.items()}

    def load_state_dict(self, state: Sequence[Values], world: World) -> None:
        """Continue from the `state_dict` of each rank of an interrupted run.

        Each rank takes what it had, so that the sums are the same to the last digit. On another
        number of ranks, rank 0 takes what all had.

        Raises:
            ValueError, TypeError, AttributeError: it is no `state_dict`.
        """
        state = [
            {name: (how, float(v), float(weight)) for name, (how, v, weight) in each.items()}
            for each in state
        ]
        if len(state) == world.size:
            self.values = dict(state[world.rank])
        elif world.is_main:
            self.values = merge(state)

    def read(self, world: World) -> dict[str, float]:
        """Return the metrics over all ranks, and start again from zero; every rank calls this.

        Raises:
            UsageError: two ranks recorded a name in two ways.
        """
        state, self.values = world.gather(self.state_dict()), {}
        self.of_ranks = state
        return {
            name: value / weight if how == "mean" else value
            for name, (how, value, weight) in sorted(merge(state).items())
            if weight
        }


def merge(state: Sequence[Values]) -> Values:
    """Return the sums and maxima over ranks; raise UsageError for a name recorded in two ways."""
    found: Values = {}
    for name, (how, value, weight) in (each for values in state for each in values.items()):
        if name in found:
            known, before, weights = found[name]
            if known != how:
                raise UsageError(f"'{name}' is recorded as {how} and as {known}: choose one")
            if how != "max":
                value += before
            elif before > value or before != before:  # a nan stays
                value = before
            weight += weights
        found[name] = (how, value, weight)
    return found


def _exact(value: float | Tensor) -> Tensor:
    """Return a number as a tensor of shape (), on its device, in a type that adds up exactly."""
    if not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float64)
    return value.detach().reshape(()).to(sum_dtype(value.device))


RECORDER = Recorder()
record = RECORDER.record
