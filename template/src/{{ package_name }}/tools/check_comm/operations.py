"""The ways in which ranks talk, and what must arrive.

Sizes and bandwidths are as nccl-tests defines them, so that figures can be compared
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). A size is that of the whole
array: for all-gather what a rank ends up with, for reduce-scatter and all-to-all what it starts
with. Algorithm bandwidth is size over time; bus bandwidth is that times a factor, which makes it
comparable with what the hardware can do, however many ranks there are.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.ranks.world import World
from .channel import Channel

log = logging.getLogger(__name__)

# torch 2.13 renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64)


def exchange(sent: Tensor, arrived: Tensor, to: int, source: int, channel: Channel) -> Tensor:
    """Send to one rank while receiving from another; return what arrived."""
    transfers = [
        dist.P2POp(dist.isend, sent, to, channel.group),
        dist.P2POp(dist.irecv, arrived, source, channel.group),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    return arrived


def run_all_reduce(sent: Tensor, _arrived: Tensor, channel: Channel) -> Tensor:
    """Sum the messages of all ranks."""
    dist.all_reduce(sent, group=channel.group)
    return sent


def run_broadcast(sent: Tensor, _arrived: Tensor, channel: Channel) -> Tensor:
    """Give the last rank's message to all."""
    dist.broadcast(sent, src=channel.world.size - 1, group=channel.group)
    return sent


def run_all_gather(sent: Tensor, arrived: Tensor, channel: Channel) -> Tensor:
    """Put together a part from each rank."""
    all_gather(arrived, sent.chunk(channel.world.size)[channel.world.rank], group=channel.group)
    return arrived


def run_reduce_scatter(sent: Tensor, arrived: Tensor, channel: Channel) -> Tensor:
    """Sum the messages of all ranks, and give a part of the sum to each."""
    part = arrived[: len(sent) // channel.world.size]
    reduce_scatter(part, sent, group=channel.group)
    return part


def run_all_to_all(sent: Tensor, arrived: Tensor, channel: Channel) -> Tensor:
    """Give a part to each rank, and get one from each."""
    dist.all_to_all_single(arrived, sent, group=channel.group)
    return arrived


def run_ring(sent: Tensor, arrived: Tensor, channel: Channel) -> Tensor:
    """Send to the next rank, and receive from the one before: point to point."""
    rank, size = channel.world.rank, channel.world.size
    return exchange(sent, arrived, (rank + 1) % size, (rank - 1) % size, channel)


@dataclass(frozen=True)
class Pattern:
    """What the ranks send: values of which every part is known without asking the rank.

    Each rank sends the same endless row of 0, 1 and 2, from another place in it. Sums of so small
    integers are exact. The period is a prime number, so no part of a message equals another.
    """

    dtype: torch.dtype
    device: torch.device
    size: int

    def part(self, rank: int, start: int, count: int) -> Tensor:
        """Return `count` elements of a rank's message, from `start` on."""
        return self._repeat(self._row().roll(-rank), start, count)

    def total(self, start: int, count: int) -> Tensor:
        """Return `count` elements of the sum of all ranks' messages, from `start` on."""
        rows = torch.stack([self._row().roll(-rank) for rank in range(self.size)])
        return self._repeat(rows.sum(0), start, count)

    def _row(self) -> Tensor:
        return torch.arange(1009, device=self.device) ** 2 % 1009 % 3

    def _repeat(self, row: Tensor, start: int, count: int) -> Tensor:
        return row.roll(-start).to(self.dtype).repeat(count // len(row) + 1)[:count]


@dataclass(frozen=True)
class Operation:
    """A way of talking.

    Args:
        run: takes part with this rank's message, and a tensor of its size for what arrives;
            returns what arrived.
        expected: what must arrive: of a pattern, at rank r of n, in messages of c elements.
        bus: bus bandwidth over algorithm bandwidth for n ranks.
    """

    run: Callable[[Tensor, Tensor, Channel], Tensor]
    expected: Callable[[Pattern, int, int, int], Tensor]
    bus: Callable[[int], float]


OPERATIONS = {
    "all-reduce": Operation(run_all_reduce, lambda p, r, n, c: p.total(0, c), lambda n: 2 - 2 / n),
    "broadcast": Operation(run_broadcast, lambda p, r, n, c: p.part(n - 1, 0, c), lambda n: 1),
    "all-gather": Operation(
        run_all_gather,
        lambda p, r, n, c: torch.cat([p.part(s, s * c // n, c // n) for s in range(n)]),
        lambda n: 1 - 1 / n,
    ),
    "reduce-scatter": Operation(
        run_reduce_scatter,
        lambda p, r, n, c: p.total(r * c // n, c // n),
        lambda n: 1 - 1 / n,
    ),
    "all-to-all": Operation(
        run_all_to_all,
        lambda p, r, n, c: torch.cat([p.part(s, r * c // n, c // n) for s in range(n)]),
        lambda n: 1 - 1 / n,
    ),
    "send/recv ring": Operation(
        run_ring, lambda p, r, n, c: p.part((r - 1) % n, 0, c), lambda n: 1
    ),
}


def elements(size: int, dtype: torch.dtype, world: World) -> int:
    """Return how many elements make a message of about `size` bytes, divisible by the ranks."""
    return max(size // dtype.itemsize // world.size, 1) * world.size


def check(name: str, sizes: Sequence[int], channel: Channel) -> int:
    """Return how many results of an operation were wrong on this rank."""
    operation, world = OPERATIONS[name], channel.world
    faults = 0
    for dtype in DTYPES:
        if dtype.is_floating_point and world.size * torch.finfo(dtype).eps > 1:
            continue  # up to 2 of each rank: more than this type can count to exactly
        pattern = Pattern(dtype, channel.device, world.size)
        for size in sizes:
            count = elements(size, dtype, world)
            sent = pattern.part(world.rank, 0, count)
            expected = operation.expected(pattern, world.rank, world.size, count)
            arrived = torch.full_like(sent, 7)
            arrived = channel.in_time(partial(operation.run, sent, arrived, channel))
            if not torch.equal(arrived, expected):
                faults += 1
                wrong = int((arrived != expected).nonzero()[0])
                log.error(
                    "wrong result of %s, %d bytes of %s: element %d is %s, but %s was expected",
                    *(name, sent.nbytes, dtype, wrong, arrived[wrong].item()),
                    expected[wrong].item(),
                )
    return faults
