"""The collectives that DDP and FSDP use, and transfers between pairs: checked and timed.

Sizes and bandwidths follow nccl-tests, so that figures can be compared
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). The size is that of the whole
array: the output of all-gather, the input of reduce-scatter. Algorithm bandwidth is size over time.
Bus bandwidth is algorithm bandwidth times a factor that makes it comparable with the hardware's,
for any number of ranks. A time is the median over rounds of the slowest rank in each round.
"""

import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.ranks.device import synchronize
from ...engine.ranks.world import World

log = logging.getLogger(__name__)

T = TypeVar("T")

# torch 2.13 renamed them.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

COLLECTIVES = ("all-reduce", "broadcast", "all-gather", "reduce-scatter")
PERIOD = 1009  # of the values in a message; a prime, so that no two parts are equal
SMALL = 2**20  # bytes: up to this size, a round has several calls, since one is too short
ROUNDS = 7
WARM_UP = 2  # rounds before those that are measured


def within(seconds: float, function: Callable[[], T]) -> T:
    """Run a function with a time limit and return its result.

    It runs in a thread, which is left behind if it hangs: some calls of NCCL and of the store wait
    for another rank without a limit.

    Raises:
        RuntimeError: the function raised it, or takes longer.
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


@dataclass(frozen=True)
class Channel:
    """What an operation is checked on.

    Args:
        world: the ranks.
        group: the process group that is checked.
        device: of the messages.
        timeout: seconds that an operation may take.
    """

    world: World
    group: dist.ProcessGroup
    device: torch.device
    timeout: int

    def values(self, ranks: Iterable[int], start: int, count: int) -> Tensor:
        """Return `count` elements, from `start` on, of the sum of some ranks' messages.

        All messages repeat one sequence of 0, 1 and 2; the message of a rank starts at its own
        position in it. Sums of such small integers are exact.
        """
        index = torch.arange(start, start + PERIOD) + torch.tensor(list(ranks)).unsqueeze(1)
        period = ((index % PERIOD) ** 2 % PERIOD % 3).sum(0).to(self.device, torch.float32)
        return period.repeat(count // PERIOD + 1)[:count]


def prepare(
    name: str, count: int, channel: Channel
) -> tuple[Callable[[], object], Tensor, Tensor, float]:
    """Prepare a collective with messages of `count` elements, a multiple of the world size.

    Returns:
        The function that runs it, its output, the correct output, and the ratio of bus bandwidth to
        algorithm bandwidth.
    """
    n, rank, group = channel.world.size, channel.world.rank, channel.group
    data, part = channel.values([rank], 0, count), count // n
    if name == "all-reduce":
        run = partial(dist.all_reduce, data, group=group)
        return run, data, channel.values(range(n), 0, count), 2 - 2 / n
    if name == "broadcast":
        run = partial(dist.broadcast, data, src=n - 1, group=group)
        return run, data, channel.values([n - 1], 0, count), 1
    if name == "all-gather":
        parts = [channel.values([each], each * part, part) for each in range(n)]
        run = partial(all_gather, data.zero_(), parts[rank], group=group)
        return run, data, torch.cat(parts), 1 - 1 / n
    output = torch.zeros(part, device=channel.device)
    run = partial(reduce_scatter, output, data, group=group)
    return run, output, channel.values(range(n), rank * part, part), 1 - 1 / n


def measure(name: str, size: int, channel: Channel) -> dict[str, Any]:
    """Check and time a collective with messages of about `size` bytes; return the results."""
    world = channel.world
    count = max(size // 4 // world.size, 1) * world.size
    run, output, expected, bus = prepare(name, count, channel)
    size = 4 * count

    def run_once() -> int:
        run()
        return int((output != expected).sum())

    wrong = within(channel.timeout, run_once)
    if wrong:
        log.error("wrong result of %s, %d bytes: %d elements differ", name, size, wrong)
    seconds = median_seconds(run, size, channel, range(world.size))
    return {
        "operation": name,
        "bytes": size,
        "microseconds": seconds * 1e6,
        "algorithm_gb_s": size / seconds / 1e9,
        "bus_gb_s": size / seconds / 1e9 * bus,
        "wrong_ranks": int(world.sum([wrong > 0])[0]),
    }


def median_seconds(
    call: Callable[[], object], size: int, channel: Channel, ranks: Iterable[int]
) -> float:
    """Return the seconds of a call with a message of `size` bytes on the slowest of some ranks."""
    calls = 20 if size <= SMALL else 1

    def one_round() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(channel.device)
        return (time.perf_counter() - began) / calls

    seconds = []
    for _ in range(WARM_UP + ROUNDS):
        dist.barrier(channel.world.control)
        seconds.append(within(channel.timeout, one_round))
    gathered = channel.world.gather(seconds[WARM_UP:])
    return statistics.median(map(max, zip(*(gathered[rank] for rank in ranks), strict=True)))


def compare(sizes: Sequence[int], channel: Channel) -> Iterator[dict[str, Any]]:
    """Measure the link between each pair of nodes, or of ranks on a single node.

    The first ranks of both nodes send to each other at the same time. The smallest message gives
    the latency, the largest gives the bandwidth of each direction. The other ranks wait.

    Raises:
        RuntimeError: wrong data arrived.
    """
    world = channel.world
    first = {host: world.hostnames.index(host) for host in world.hostnames}
    for pair in combinations(first.values() if len(first) > 1 else range(world.size), 2):
        peer = sum(pair) - world.rank if world.rank in pair else None
        seconds = []
        for size in (sizes[0], sizes[-1]):
            sent = torch.full((max(size // 4, 1),), float(world.rank), device=channel.device)
            received = sent.clone()
            call = partial(exchange, sent, received, peer, channel.group)
            seconds.append(median_seconds(call, sent.nbytes, channel, pair))
            if peer is not None and not (received == peer).all():
                raise RuntimeError(f"wrong data from rank {peer} on {world.hostnames[peer]}")
        yield {
            "ranks": list(pair),
            "hosts": [world.hostnames[rank] for rank in pair],
            "microseconds": seconds[0] * 1e6,
            "gb_s": sent.nbytes / seconds[1] / 1e9,
        }


def exchange(sent: Tensor, received: Tensor, peer: int | None, group: dist.ProcessGroup) -> None:
    """Send to another rank while receiving from it; without a peer, do nothing."""
    if peer is not None:
        transfers = [
            dist.P2POp(dist.isend, sent, peer, group),
            dist.P2POp(dist.irecv, received, peer, group),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
