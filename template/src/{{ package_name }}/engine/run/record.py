"""Records numbers between two log lines, and reduces them over all ranks.

Call `record` where the number is computed, for example in model.py:

    record("confidence", outputs.softmax(1).amax(1).mean(), weight=len(outputs))

In training, this is the metric train/confidence. In an evaluation, it is validation/confidence or
test/confidence. A tensor stays on its device until the line is logged, so that no step waits for
it. Numbers that a loading worker records are lost, since it is another process.
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
# Names that the training loop and evaluations use for their own metrics.
TAKEN = re.compile(
    r"train/(lr(/.*)?|(data|slowest_hook)_seconds|skipped_steps|\w+_per_second|mfu_percent"
    r"|(\w+_)?(loss|gradient_norm))|(validation|test)/.*"
)
NAME = re.compile(r"[\w.: -]+(/[\w.: -]+)*", re.ASCII)
Values = dict[str, tuple[How, Any, float]]
"""By name: the reduction, the sum or the maximum (a float or a tensor), and the sum of weights."""


class Recorder:
    """Keeps the numbers that this rank has recorded since the last `read`.

    Attributes:
        split: the split of the evaluation that runs now, "" in training.
    """

    def __init__(self) -> None:
        self.values: Values = {}
        self.split = ""

    def record(
        self, name: str, value: float | Tensor, how: How = "mean", weight: float = 1.0
    ) -> None:
        """Record a number for the next log line, or for the result of an evaluation.

        Args:
            name: the name of the metric. If it has no slash, it gets the prefix "train/". In an
                evaluation, the prefix is the split.
            value: a real number, or a tensor with one element.
            how: the reduction over steps and ranks: "mean", "sum" or "max".
            weight: the weight of the value in a mean, such as the number of samples. With weight 0,
                the value does not count, even if it is nan.

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
                f"can't record '{name}' as '{how}': always use the same one of "
                f"{', '.join(get_args(How))}"
            )
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"can't record '{name}': {tuple(value.shape)} is not one number")
        if isinstance(value, Tensor) and value.is_complex():
            raise ValueError(f"can't record '{name}': {value.dtype} is not a real number")
        weight = float(weight) if how == "mean" else 1.0
        if not 0 <= weight < math.inf:
            raise ValueError(
                f"can't record '{name}' with weight {weight}: it must be finite, not negative"
            )
        self.add(name, value, weight, how)

    def add(self, name: str, value: float | Tensor, weight: float, how: How = "mean") -> None:
        """Record a number as `record` does, but without checks: the name may be a taken one."""
        _, total, weights = self.values.get(name, (how, -math.inf if how == "max" else 0.0, 0.0))
        if isinstance(value, Tensor):
            value = value.detach().reshape(())
            if not isinstance(total, Tensor):  # unlike torch.tensor, torch.full waits for no GPU
                total = torch.full((), total, dtype=sum_dtype(value.device), device=value.device)
        else:
            value = float(value)
        if how == "max":
            total = _larger(total, value)
        elif weight and isinstance(value, Tensor):  # torch.add computes with the dtype of the sum
            total = torch.add(total, value, alpha=weight)
        elif weight:  # else the value may be nan, and zero times nan is nan
            total = total + value * weight
        self.values[name] = (how, total, weights + weight)

    @contextmanager
    def apart(self, split: str = "unused") -> Iterator[None]:
        """Return a context with its own numbers, for example for an evaluation.

        At the end of the context, numbers that were not read are dropped.
        """
        before = self.values, self.split
        self.values, self.split = {}, split
        try:
            yield
        finally:
            self.values, self.split = before

    def state_dict(self) -> Values:
        """Return the numbers of this rank."""
        return {name: (how, float(v), weight) for name, (how, v, weight) in self.values.items()}

    def load_state_dict(self, state: Sequence[Values], world: World) -> None:
        """Continue from the `state_dict` of each rank of an interrupted run.

        Each rank takes its own numbers, so that sums are the same to the last digit. If the number
        of ranks has changed, rank 0 takes the numbers of all ranks.

        Raises:
            ValueError, TypeError, AttributeError: `state` is not a list of such states.
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
        """Return the metrics over all ranks, and reset them; every rank calls this.

        Raises:
            UsageError: ranks recorded the same name with different reductions.
        """
        state, self.values = world.gather(self.state_dict()), {}
        return {
            name: value / weight if how == "mean" else value
            for name, (how, value, weight) in sorted(merge(state).items())
            if weight
        }


def merge(state: Sequence[Values]) -> Values:
    """Return the sums and maxima over ranks.

    Raises:
        UsageError: ranks recorded the same name with different reductions.
    """
    found: Values = {}
    for name, (how, value, weight) in (each for values in state for each in values.items()):
        if name in found:
            known, before, weights = found[name]
            if known != how:
                raise UsageError(f"'{name}' is recorded as {how} and as {known}: choose one")
            value = _larger(before, value) if how == "max" else before + value
            weight += weights
        found[name] = (how, value, weight)
    return found


def _larger(one: float | Tensor, other: float | Tensor) -> float | Tensor:
    """Return the larger number, or nan if one of them is nan; of tensors, without waiting."""
    if isinstance(one, Tensor):
        return torch.maximum(one, torch.as_tensor(other, dtype=one.dtype, device=one.device))
    return other if other > one or other != other else one


RECORDER = Recorder()
record = RECORDER.record
