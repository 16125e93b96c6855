"""Ranks on one machine that connect through Gloo, as the ranks of a training do for `StepTotals`.

All ranks are in one process, each with its own group, sockets and threads. Prints figures.
"""

import json
import os
import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SIZE = int(os.environ["WORLD_SIZE"])
VOTES, PARKED = 9, 0.05  # seconds until all ranks except one wait


def main() -> None:
    """Connect the ranks, and sum as `StepTotals` does."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    store, before = dist.HashStore(), descriptors()
    with ThreadPoolExecutor(SIZE) as pool:
        ranks = list(
            pool.map(
                lambda rank: dist.ProcessGroupGloo(store, rank, SIZE, timedelta(minutes=1)),
                range(SIZE),
            )
        )
    vote(ranks)
    took = statistics.median(vote(ranks) for _ in range(VOTES))
    opened = (descriptors() - before) / SIZE
    print(json.dumps({"vote ms": 1000 * took, "descriptors": opened}), flush=True)


def vote(ranks: list[dist.ProcessGroupGloo]) -> float:
    """Return the seconds from the vote of the last rank until all ranks know the result."""
    tallies = [torch.tensor([0, 32]) for _ in ranks]
    waiting = [rank.allreduce([each]) for rank, each in zip(ranks[1:], tallies[1:], strict=True)]
    time.sleep(PARKED)
    began = time.perf_counter()
    for each in [ranks[0].allreduce([tallies[0]]), *waiting]:
        each.wait()
    took = time.perf_counter() - began
    assert all(each.tolist() == [0, 32 * SIZE] for each in tallies)
    return took


def descriptors() -> int:
    """Return how many files and sockets this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


main()
os._exit(0)
