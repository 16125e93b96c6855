"""What the tests of loading send to workers.

A worker imports this module before its first sample: it is small, because that happens often.
"""

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch

LOCK = threading.Lock()


def uneven(shard: int) -> Iterator[int]:
    """Yield 10 × (n + 1) numbers of shard n."""
    assert not LOCK.locked(), "this process would wait forever"
    first = 10 * shard * (shard + 1) // 2
    yield from range(first, first + 10 * (shard + 1))


def twenty(shard: int) -> Iterator[int]:
    """Yield as many numbers for each shard."""
    yield from range(20)


def noted(log: Path, number: int) -> float:
    """Write a byte to a file, so that the calls can be counted."""
    with log.open("a") as file:
        file.write(".")
    return number + random.random()


class Drawing:
    """A data set whose samples are random numbers of three kinds."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, torch.rand(()).item(), numpy.random.rand(), random.random()


def draws(shard: int) -> Iterator[tuple[int, float, float, float]]:
    """Yield the samples of a shard as `Drawing` has them."""
    return (Drawing()[10 * shard + number] for number in range(10))
