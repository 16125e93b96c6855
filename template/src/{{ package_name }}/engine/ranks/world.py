"""The ranks that train together, and how they exchange values."""

import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UsageError


@dataclass
class World:
    """The ranks that train together, from the view of one of them.

    Gradients are averaged in the default process group. Everything else goes through `control`, a
    Gloo group between CPUs, so that no GPU waits for it.

    Attributes:
        backend: the backend of the default process group; None with a single process.
        hostnames: the host name of each rank.
        control: None with a single process.
        nodes: Slurm's name of each rank's node.
        mesh: the DeviceMesh of FSDP, None until it is made.
        store: the key-value store at which the ranks met.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str
    device: torch.device
    backend: str | None
    hostnames: tuple[str, ...]
    control: dist.ProcessGroup | None
    nodes: tuple[str, ...] = ()
    mesh: Any = None
    store: dist.Store | None = None

    @classmethod
    def alone(cls) -> "World":
        """Return a world that consists of this process only, on the CPU."""
        return cls(0, 1, 0, "none", torch.device("cpu"), None, (socket.gethostname(),), None)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the files."""
        return self.rank == 0

    def all_reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:  # noqa: ANN401 - RedOpType
        """Reduce a CPU tensor over all ranks, in place, and return it."""
        if self.size > 1 and values.numel():
            dist.all_reduce(values, operation, group=self.control)
        return values

    def maximum(self, values: list[float]) -> list[float]:
        """Return the maximum of each value over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        return self.all_reduce(tensor, dist.ReduceOp.MAX).tolist()

    def broadcast(self, value: Any) -> Any:  # noqa: ANN401 - whatever can be pickled
        """Return rank 0's value on every rank."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, group=self.control)
        return values[0]

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 - whatever can be pickled
        """Return the values of all ranks, on every rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def collect(self, value: Any) -> list[Any] | None:  # noqa: ANN401 - whatever can be pickled
        """Return the values of all ranks on rank 0, and None on the others."""
        values = [value] * self.size if self.is_main else None
        if self.size > 1:
            dist.gather_object(value, values, group=self.control)
        return values

    def on_main(self, function: Callable[[], Any]) -> Any:  # noqa: ANN401 - what it returns
        """Call a function on rank 0 and return its result on every rank.

        Raises:
            UsageError: on every rank, if the function raised it on rank 0.
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
        """Leave the process group after all ranks have called this."""
        if self.size > 1:
            # Rank 0 may still write files, and the launcher stops all ranks when one has left. Its
            # figures, hooks and trackers may take longer than the timeout of the barrier.
            if self.store and self.is_main:
                self.store.set("rank 0 is done", "")
            elif self.store:
                self.store.wait(["rank 0 is done"], timedelta(days=1))
            dist.barrier(self.control)
            # Gloo's threads free Python tensors. If they do so while the interpreter shuts down,
            # the process aborts. The threads end with the last reference to the group.
            self.control = self.mesh = None
            dist.destroy_process_group()
