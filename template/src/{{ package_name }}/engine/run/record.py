"""Numbers that each rank records between two log lines, and their reduction over all ranks.

Call `record` where a number arises, such as in model.py:

    record("confidence", outputs.softmax(1).amax(1).mean(), weight=len(outputs))

In training this is the metric train/confidence, in an evaluation validation/confidence or
test/confidence. A tensor stays on its device until the line is logged, so that no step waits for
it. What a loading worker records is lost: it is another process.
"""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..errors import UsageError
from ..ranks.device import sum_dtype
from ..ranks.world import World

How = Literal["mean", "sum", "max", "each"]
# The names that the training loop logs.
TAKEN = re.compile(
    r"step|time|epoch|train/lr(/.*)?|train/(\w+_)?(loss|gradient_norm)|train/\w+_per_second"
    r"|train/data_seconds"
)
NAME = re.compile(r"[\w.: -]+(/[\w.: -]+)*", re.ASCII)
Values = dict[str, tuple[How, Any, float]]
"""By name: how, the sum, maximum or newest value (a float or a tensor), and the sum of weights."""


class Recorder:
    """What a rank has recorded since the last reading.

    Attributes:
        split: "train", or the name of the evaluation that is running.
    """

    def __init__(self) -> None:
        self.values: Values = {}
        self.active = True
        self.split = "train"

    def record(
        self, name: str, value: float | Tensor, how: How = "mean", weight: float = 1.0
    ) -> None:
        """Record a number.

        Args:
            name: of the metric; a name without a slash gets the split as its prefix.
            value: a number or a tensor of one.
            how: how steps and ranks are reduced: to their mean, sum or maximum; or `each`: the
                newest value of each rank, as name/rank0, name/rank1...
            weight: of the value in a mean, such as its number of samples. With weight 0 the value
                does not count, even if it is nan.

        Raises:
            ValueError: the name is taken or not valid, or the value is not one number.
        """
        if not self.active:
            return
        if not NAME.fullmatch(name):
            raise ValueError(f"can't record '{name}': use letters, digits and ' _-.:/' in the name")
        name = self._qualified(name)
        if self.split == "train" and TAKEN.fullmatch(name):
            raise ValueError(f"can't record '{name}', which the training loop logs: rename it")
        if how not in get_args(How) or self.values.get(name, (how,))[0] != how:
            raise ValueError(
                f"can't record '{name}' as '{how}': the same one of {', '.join(get_args(How))}"
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"can't record '{name}': {tuple(value.shape)} is not one number")
        if how == "mean":
            self.add(name, value, float(weight))
            return
        value = _exact(value)
        if how != "each" and name in self.values:
            before = _exact(self.values[name][1]).to(value)
            value = before + value if how == "sum" else torch.maximum(before, value)
        self.values[name] = (how, value, 1.0)

    def add(self, name: str, value: float | Tensor, weight: float) -> None:
        """Add a value to a mean, as `record` does, but under any name."""
        value = _exact(value)
        # Not zero times the value, which may be nan.
        total = value * weight if weight else torch.zeros_like(value)
        if name in self.values:
            _, before, weights = self.values[name]
            total, weight = _exact(before).to(total) + total, weights + weight
        self.values[name] = ("mean", total, weight)

    def _qualified(self, name: str) -> str:
        """Return a metric's name with the split that it belongs to."""
        first, slash, rest = name.partition("/")
        if not slash:
            return f"{self.split}/{name}"
        if self.split != "train":
            return f"{self.split}/{rest if first == 'train' else name}"
        if first in ("validation", "test"):
            raise ValueError(f"can't record '{name}' in training: '{rest}' gets the split's name")
        return name

    @contextmanager
    def evaluating(self, split: str) -> Iterator[None]:
        """Record for an evaluation; what is not read before the end is dropped."""
        training, self.values, self.split = self.values, {}, split
        try:
            yield
        finally:
            self.values, self.split = training, "train"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore calls of `record`."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def state_dict(self, world: World) -> list[Values]:
        """Return what each rank has, in the order of ranks; every rank calls this."""
        return world.gather(self._floats())

    def load_state_dict(self, state: Sequence[Values], world: World) -> None:
        """Continue from the `state_dict` of an interrupted run.

        Each rank takes what it had, so that the sums are the same to the last digit. On another
        number of ranks, rank 0 takes the sums of all.
        """
        if len(state) == world.size:
            self.values = dict(state[world.rank])
            return
        for values in state:
            for name, (how, value, weight) in values.items():
                if how == "max":
                    self.record(name, value, how)
                elif how != "each" and world.is_main:
                    _, before, weights = self.values.get(name, (how, 0.0, 0.0))
                    self.values[name] = (how, before + value, weights + weight)

    def read(self, world: World) -> tuple[dict[str, float], dict[str, float]]:
        """Return the metrics over all ranks, and this rank's own; start again from zero.

        Every rank calls this.

        Raises:
            UsageError: two ranks recorded a name in two ways.
        """
        self._complete(world)
        mine, self.values = self._floats(), {}
        added = [entry[1:] for entry in mine.values() if entry[0] in ("mean", "sum")]
        sums = iter(world.sum([number for pair in added for number in pair]))
        maxima = iter(world.maximum([v for how, v, _ in mine.values() if how == "max"]))
        reduced: Values = {}
        for name, (how, _, _) in mine.items():
            if how == "max":
                reduced[name] = (how, next(maxima), 1.0)
            elif how != "each":
                reduced[name] = (how, next(sums), next(sums))
        each = {name: entry for name, entry in mine.items() if entry[0] == "each"}
        for rank, values in enumerate(world.gather(each) if each else ()):
            reduced |= {f"{name}/rank{rank}": entry for name, entry in values.items()}
        return _metrics(reduced), _metrics(mine)

    def _floats(self) -> Values:
        """Return the values as floats, sorted by name."""
        found = sorted(self.values.items())
        return {name: (how, float(value), float(weight)) for name, (how, value, weight) in found}

    def _complete(self, world: World) -> None:
        """Add the names that only other ranks recorded, such as ranks that had a sample."""
        mine = {name: how for name, (how, _, _) in self.values.items()}
        digest = zlib.crc32(repr(sorted(mine.items())).encode())
        highest, lowest = world.maximum([digest, -digest])
        if highest == -lowest:
            return
        for theirs in world.gather(mine):
            for name, how in theirs.items():
                if mine.get(name, how) != how:
                    raise UsageError(
                        f"'{name}' is recorded as {how} and as {mine[name]}: choose one"
                    )
                self.values.setdefault(name, (how, float("-inf") if how == "max" else 0.0, 0.0))


def _exact(value: float | Tensor) -> Tensor:
    """Return a number as a tensor of shape (), on its device, in a type that adds up exactly."""
    if not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float64)
    return value.detach().reshape(()).to(sum_dtype(value.device))


def _metrics(values: Mapping[str, tuple[How, float, float]]) -> dict[str, float]:
    """Return the sums, the maxima and the newest values, and the means as sum over weights."""
    return {
        name: value / weight if how == "mean" else value
        for name, (how, value, weight) in values.items()
        if weight
    }


RECORDER = Recorder()
record = RECORDER.record
