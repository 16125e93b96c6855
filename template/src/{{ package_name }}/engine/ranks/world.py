"""This rank's view of all ranks, and how they exchange values."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UsageError


@dataclass
class World:
    """The ranks that train together, seen from one of them.

    Gradients travel through the default process group. What ranks tell each other besides goes
    through `control`, a group of its own, over Gloo and between CPUs: no GPU waits for it.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str
    device: torch.device
    backend: str | None
    hostnames: tuple[str, ...]
    control: dist.ProcessGroup | None

    @classmethod
    def alone(cls) -> "World":
        """Return a world of this process alone, on the CPU."""
        host = socket.gethostname()
        return cls(0, 1, 0, "none", torch.device("cpu"), None, (host,), None)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the files."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums of the values over all ranks, the same numbers on each."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def maximum(self, values: list[float]) -> list[float]:
        """Return the largest of each value over all ranks, the same numbers on each."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Return the sums of a tensor on the CPU over all ranks, the same on each."""
        if self.size > 1 and values.numel():
            dist.all_reduce(values, group=self.control)
        return values

    def _reduce(self, values: list[float], operation: Any) -> list[float]:  # noqa: ANN401 - RedOpType
        if self.size == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)  # in which counts stay exact
        dist.all_reduce(tensor, operation, group=self.control)
        return tensor.tolist()

    def start_sum(self, values: list[int]) -> "Sum":
        """Start to sum the values over all ranks, and return what has the sums later."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self.size == 1:
            return Sum(tensor, None)
        return Sum(tensor, dist.all_reduce(tensor, group=self.control, async_op=True))

    def broadcast(self, value: Any) -> Any:  # noqa: ANN401 - whatever can be pickled
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.control)
        return values[0]

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 - whatever can be pickled
        """Return the values of all ranks, on every rank."""
        values = [value]
        if self.size > 1:
            values *= self.size
            dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_on_main(self, value: Any) -> list[Any]:  # noqa: ANN401 - whatever can be pickled
        """Return the values of all ranks on rank 0, an empty list on the others."""
        values = [value] * self.size if self.is_main else []
        if self.size > 1:
            dist.gather_object(value, values or None, group=self.control)
        return values

    def on_main(self, function: Callable[[], Any]) -> Any:  # noqa: ANN401 - what it returns
        """Call a function on rank 0 and return on every rank what it returned.

        Raises:
            UsageError: on every rank, where the function raised it; so no rank waits for one that
                has left.
        """
        result = None
        if self.is_main:
            try:
                result = function()
            except UsageError as error:
                result = error
        result = self.broadcast(result)
        if isinstance(result, UsageError):
            raise result
        return result

    def leave(self) -> None:
        """Part from the other ranks, when all have come here."""
        if self.size > 1:
            # Rank 0 may still have been writing, and the launcher ends all once one has left.
            dist.barrier(self.control)
            # Gloo's threads drop tensors that Python made, and abort the process if they do so
            # while the interpreter shuts down. They are joined with the last reference.
            self.control = None
            dist.destroy_process_group()


@dataclass
class Sum:
    """Sums over all ranks that are on their way while a rank does something else."""

    tensor: Tensor
    work: dist.Work | None

    def result(self) -> list[int]:
        """Wait for the others; return the sums, the same numbers on each rank."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.tensor.tolist()
