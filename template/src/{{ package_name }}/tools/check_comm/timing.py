"""How fast the ranks talk.

Times are of float32 messages: the median over rounds of the slowest rank in each round.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...core.ranks.device import synchronize
from .channel import Channel
from .operations import OPERATIONS, elements, exchange

SMALL = 2**20  # bytes: up to here a call is so short that a round takes many
ROUNDS = 7
WARMING_UP = 2  # rounds that do not count
SLOW = 0.5  # of the bandwidth that the upper quarter of the pairs reaches


def rounds(call: Callable[[], object], size: int, channel: Channel) -> list[list[float]]:
    """Time calls with a message of `size` bytes: seconds a call, of each rank in each round."""
    calls = 20 if size <= SMALL else 1

    def one_round() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(channel.device)
        return (time.perf_counter() - began) / calls

    seconds = []
    for _ in range(WARMING_UP + ROUNDS):
        dist.barrier(channel.world.control)
        seconds.append(channel.in_time(one_round))
    return channel.world.gather(seconds[WARMING_UP:])


def typical(seconds: Sequence[Sequence[float]]) -> float:
    """Return the median over rounds of the slowest rank, from the rounds of each rank."""
    return statistics.median(map(max, zip(*seconds, strict=True)))


def measure(name: str, sizes: Sequence[int], channel: Channel) -> list[dict[str, Any]]:
    """Return time and bandwidth of an operation for each size."""
    operation, world = OPERATIONS[name], channel.world
    rows = []
    for size in sizes:
        count = elements(size, torch.float32, world)
        sent, arrived = torch.zeros(2, count, device=channel.device)
        call = partial(operation.run, sent, arrived, channel)
        seconds = typical(rounds(call, sent.nbytes, channel))
        bandwidth = sent.nbytes / seconds / 1e9
        rows.append(
            {
                "operation": name,
                "bytes": sent.nbytes,
                "microseconds": seconds * 1e6,
                "algorithm_gb_s": bandwidth,
                "bus_gb_s": bandwidth * operation.bus(world.size),
            }
        )
    return rows


def compare(sizes: Sequence[int], channel: Channel) -> list[dict[str, Any]]:
    """Measure the link between the nodes of each pair, or ranks if there is one node.

    The first ranks of both nodes send to each other at once: a small message for the latency, the
    largest for the bandwidth of each direction. Pairs without a node in common do so at the same
    time.
    """
    world = channel.world
    first = {host: world.hostnames.index(host) for host in world.hostnames}
    members = list(first.values()) if len(first) > 1 else list(range(world.size))
    pairs = []
    for turn in turns(members):
        peer = {a: b for pair in turn for a, b in (pair, pair[::-1])}.get(world.rank)
        seconds = []
        for size in (sizes[0], sizes[-1]):
            sent, arrived = torch.zeros(2, max(size // 4, 1), device=channel.device)
            call: Callable[[], object] = nothing
            if peer is not None:
                call = partial(exchange, sent, arrived, peer, peer, channel)
            seconds.append(rounds(call, sent.nbytes, channel))
        for a, b in turn:
            latency, duration = (typical([each[a], each[b]]) for each in seconds)
            pairs.append(
                {
                    "ranks": [a, b],
                    "hosts": [world.hostnames[a], world.hostnames[b]],
                    "microseconds": latency * 1e6,
                    "gb_s": sent.nbytes / duration / 1e9,
                }
            )
    return mark_slow(sorted(pairs, key=lambda pair: pair["ranks"]))


def mark_slow(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the pairs that reach less than half of the bandwidth that the upper quarter reaches.

    Not of the median: one bad node out of three makes two pairs of three slow.
    """
    speeds = sorted(pair["gb_s"] for pair in pairs)
    limit = SLOW * speeds[len(speeds) * 3 // 4]
    return [{**pair, "slow": pair["gb_s"] < limit} for pair in pairs]


def nothing() -> None:
    """Do nothing: what a rank does that has no peer in a turn."""


def turns(members: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield every pair once, in turns in which nobody is in two pairs.

    Source: the circle method of round-robin tournaments.
    """
    circle: list[int | None] = [*members, *[None] * (len(members) % 2)]
    half = len(circle) // 2
    for _ in range(len(circle) - 1):
        opposite = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        circle[1:] = [circle[-1], *circle[1:-1]]
