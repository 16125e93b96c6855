"""Collectives and transfers between pairs of ranks: checked and timed.

Sizes and bandwidths are defined as in nccl-tests, so that numbers can be compared
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). The size is that of the whole
array; for all-gather, it is that of the output. Bus bandwidth is size divided by time, times a
factor, so that it can be compared with the bandwidth of the hardware for any number of ranks.
"""

import statistics
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.ranks.world import World

T = TypeVar("T")

# PyTorch 2.13 renamed this function.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

PERIOD = 1009  # period of the values in a message; a prime number, so that no two parts are equal
SMALL = 2**20  # bytes; up to this size, a round has several calls, since one is too short to time
ROUNDS = 7
WARM_UP = 2  # rounds before the measured ones


@dataclass(frozen=True)
class Channel:
    """The process group to check, and the device of its messages."""

    world: World
    group: dist.ProcessGroup
    device: torch.device
    timeout: int  # seconds that an operation may take


def within(seconds: float, function: Callable[[], T]) -> T:
    """Run a function with a time limit and return its result.

    It runs in a thread. NCCL may wait for another rank without a limit; the thread is then
    abandoned.

    Raises:
        RuntimeError: the function raised it, or takes longer than the limit.
    """
    result: futures.Future[T] = futures.Future()

    def work() -> None:
        try:
            result.set_result(function())
        except RuntimeError as error:
            result.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return result.result(seconds)
    except futures.TimeoutError:
        raise RuntimeError(f"not finished after {seconds} seconds") from None


def measure(name: str, size: int, channel: Channel) -> dict[str, Any]:
    """Check and time all-reduce or all-gather with messages of about `size` bytes.

    Raises:
        RuntimeError: the operation fails, takes too long, or has a wrong result.
    """
    world, n = channel.world, channel.world.size
    part = max(size // 4 // n, 1)
    # A rank's message is this pattern plus the rank's mark. Sums of such small integers are exact.
    pattern = (torch.arange(part * n) % PERIOD).to(channel.device, torch.float32)
    marks = (torch.arange(n) % 5).to(channel.device, torch.float32)
    output = pattern + marks[world.rank]
    call: Callable[[], Any]
    if name == "all-reduce":
        call = partial(dist.all_reduce, output, group=channel.group)
        expected, factor = n * pattern + marks.sum(), 2 - 2 / n
    else:
        own = output.chunk(n)[world.rank].clone()
        call = partial(all_gather, output.zero_(), own, group=channel.group)
        expected, factor = pattern + marks.repeat_interleave(part), 1 - 1 / n

    def is_right() -> bool:
        call()
        return torch.equal(output, expected)

    if not within(channel.timeout, is_right):
        raise RuntimeError(f"wrong result, {output.nbytes} bytes")
    seconds = median_seconds(call, output.nbytes, channel)
    return {
        "operation": name,
        "bytes": output.nbytes,
        "microseconds": seconds * 1e6,
        "bus_gb_s": output.nbytes / seconds / 1e9 * factor,
    }


def median_seconds(call: Callable[[], object], size: int, channel: Channel) -> float:
    """Return the median time of a call with a message of `size` bytes, on the slowest rank."""
    calls = 20 if size <= SMALL else 1

    def one_round() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        if channel.device.type != "cpu":
            torch.accelerator.synchronize()
        return (time.perf_counter() - began) / calls

    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier(channel.world.control)
        seconds.append(within(channel.timeout, one_round))
    return channel.world.maximum([statistics.median(seconds[WARM_UP:])])[0]


def measure_pair(pair: tuple[int, int], sizes: tuple[int, int], channel: Channel) -> dict[str, Any]:
    """Measure how fast two ranks send to each other at the same time, while the others wait.

    The small message gives the latency, and the large one gives the bandwidth of each direction.

    Raises:
        RuntimeError: the operation fails, takes too long, or has a wrong result.
    """
    world = channel.world
    peer = sum(pair) - world.rank
    seconds = []
    for size in sizes:
        sent = torch.full((size // 4,), float(world.rank), device=channel.device)
        received = sent.clone()
        call = partial(exchange, sent, received, peer, channel.group)
        involved = world.rank in pair
        seconds.append(median_seconds(call if involved else lambda: None, size, channel))
        if involved and not (received == peer).all():
            raise RuntimeError(f"wrong data arrived, {sent.nbytes} bytes")
    return {
        "ranks": list(pair),
        "hosts": [world.hostnames[rank] for rank in pair],
        "microseconds": seconds[0] * 1e6,
        "gb_s": sizes[1] / seconds[1] / 1e9,
    }


def exchange(sent: Tensor, received: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    """Send to another rank while receiving from it."""
    transfers = [
        dist.P2POp(dist.isend, sent, peer, group),
        dist.P2POp(dist.irecv, received, peer, group),
    ]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()


def mark_slow(pairs: list[dict[str, Any]]) -> None:
    """Mark the pairs whose bandwidth is less than half of the upper quartile.

    The median would be too low: one bad node out of three makes two of three pairs slow.
    """
    speeds = sorted(pair["gb_s"] for pair in pairs)
    for pair in pairs:
        pair["slow"] = pair["gb_s"] < speeds[len(speeds) * 3 // 4] / 2
