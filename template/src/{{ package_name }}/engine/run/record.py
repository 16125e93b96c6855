"""Numbers that each rank records between two log lines, and what they come to over all ranks.

Call `record` where a number arises, such as in model.py:

    record("confidence", outputs.softmax(1).amax(1).mean(), weight=len(outputs))

In training this is the metric train/confidence, in an evaluation validation/confidence or
test/confidence. A tensor stays on its device until the line is logged, so that no step waits for
it. What a loading worker records is left out: it is another process.
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
# What the loop itself logs.
TAKEN = re.compile(
    r"step|time|epoch|train/lr(/.*)?|train/(\w+_)?(loss|gradient_norm)|train/\w+_per_second"
    r"|train/data_seconds"
)
NAME = re.compile(r"[\w.: -]+(/[\w.: -]+)*", re.ASCII)
Total = dict[str, tuple[How, float, float]]
"""Of each name: how, the sum or the largest value, the sum of weights."""


class Store:
    """What a rank has recorded since the last reading.

    Attributes:
        split: what is going on: "train", or the evaluation's name.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, tuple[How, Any, float]] = {}
        self.active = True
        self.split = "train"

    def record(
        self, name: str, value: float | Tensor, how: How = "mean", weight: float = 1.0
    ) -> None:
        """Record a number.

        Args:
            name: of the metric; without a slash, it is put behind that of the split.
            value: a number or a tensor of one.
            how: what is made of all steps and ranks: their mean, sum or maximum; or `each`: the
                newest value of each rank, as name/rank0, name/rank1...
            weight: of the value in a mean, such as its number of samples. With weight 0 the value
                does not count, not even if it is nan.

        Raises:
            ValueError: a name that is taken or that trackers can't have, or not one number.
        """
        if not self.active:
            return
        if not NAME.fullmatch(name):
            raise ValueError(f"can't record '{name}': use letters, digits and ' _-.:/' in the name")
        name = self._qualified(name)
        if self.split == "train" and TAKEN.fullmatch(name):
            raise ValueError(f"can't record '{name}', which the training loop logs: rename it")
        if how not in get_args(How) or self.numbers.get(name, (how,))[0] != how:
            raise ValueError(
                f"can't record '{name}' as '{how}': the same one of {', '.join(get_args(How))}"
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"can't record '{name}': {tuple(value.shape)} is not one number")
        if how == "mean":
            self.add(name, value, float(weight))
            return
        value = _exact(value)
        if how != "each" and name in self.numbers:
            before = _exact(self.numbers[name][1]).to(value)
            value = before + value if how == "sum" else torch.maximum(before, value)
        self.numbers[name] = (how, value, 1.0)

    def add(self, name: str, value: float | Tensor, weight: float) -> None:
        """Add a value to a mean, as `record` does, but under a name of the loop's own."""
        value = _exact(value)
        # Not zero times the value, which may be nan.
        total = value * weight if weight else torch.zeros_like(value)
        if name in self.numbers:
            _, before, weights = self.numbers[name]
            total, weight = _exact(before).to(total) + total, weights + weight
        self.numbers[name] = ("mean", total, weight)

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
        """Record for an evaluation meanwhile; what is not read before the end is dropped."""
        training, self.numbers, self.split = self.numbers, {}, split
        try:
            yield
        finally:
            self.numbers, self.split = training, "train"

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing meanwhile."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def total(self, world: World) -> Total:
        """Return what all ranks together have, but for `each`; every rank must call this."""
        self._agree(world)
        # Each rank may have recorded them in another order.
        summed = sorted(
            name for name, (how, _, _) in self.numbers.items() if how in ("mean", "sum")
        )
        largest = sorted(name for name, (how, _, _) in self.numbers.items() if how == "max")
        sums = world.sum([float(x) for name in summed for x in self.numbers[name][1:]])
        maxima = world.maximum([float(self.numbers[name][1]) for name in largest])
        pairs = zip(sums[::2], sums[1::2], strict=True)
        found = dict(zip(summed, pairs, strict=True)) | {
            name: (value, 1.0) for name, value in zip(largest, maxima, strict=True)
        }
        return {
            name: (how, *found[name]) for name, (how, _, _) in self.numbers.items() if name in found
        }

    def state_dict(self, world: World) -> list[Total]:
        """Return on rank 0 what each rank has, in the order of ranks; every rank must call this."""
        mine = {name: (how, float(v), float(w)) for name, (how, v, w) in self.numbers.items()}
        return world.gather_on_main(mine)

    def load_state_dict(self, state: Sequence[Total], world: World) -> None:
        """Go on from the `state_dict` of an interrupted run.

        Each rank takes what it had, so that the sums come out the same to the last digit. On
        another number of ranks, rank 0 takes the sums of all.
        """
        if len(state) == world.size:
            self.numbers = dict(state[world.rank])
            return
        for each in state:
            for name, (how, value, weight) in each.items():
                if how == "max":
                    self.record(name, value, how)
                elif how != "each" and world.is_main:
                    _, before, weights = self.numbers.get(name, (how, 0.0, 0.0))
                    self.numbers[name] = (how, before + value, weights + weight)

    def read(self, world: World) -> tuple[dict[str, float], dict[str, float]]:
        """Return the numbers over all ranks, and this rank's own; start again from zero.

        Every rank must call this.
        """
        over_all = numbers(self.total(world))
        each = {
            name: float(value)
            for name, (how, value, weight) in self.numbers.items()
            if how == "each" and weight
        }
        if any(how == "each" for how, _, _ in self.numbers.values()):
            for rank, values in enumerate(world.gather(each)):
                over_all |= {f"{name}/rank{rank}": value for name, value in values.items()}
        own = numbers({name: (h, float(v), w) for name, (h, v, w) in self.numbers.items()})
        self.numbers = {}
        return over_all, own

    def _agree(self, world: World) -> None:
        """Make all ranks hold the same names: one that had no sample lacks what samples give."""
        mine = {name: how for name, (how, _, _) in self.numbers.items()}
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
                self.numbers.setdefault(name, (how, float("-inf") if how == "max" else 0.0, 0.0))


def _exact(value: float | Tensor) -> Tensor:
    """Return a number as a tensor of shape (), on its device, in the type to add numbers up in."""
    if not isinstance(value, Tensor):
        return torch.tensor(float(value), dtype=torch.float64)
    return value.detach().reshape(()).to(sum_dtype(value.device))


def numbers(total: Mapping[str, tuple[How, float, float]]) -> dict[str, float]:
    """Return the sums, the maxima, and the means as sum over weights."""
    return {
        name: value / weight if how == "mean" else value
        for name, (how, value, weight) in total.items()
        if weight
    }


STORE = Store()
record = STORE.record
