"""Training sets that are read from front to back, shard by shard."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..errors import UsageError
from .seeds import derive, seed_generators

SKIPPED = object()
"""Stands for a sample of a batch that a resumed run drops."""


class ShardStream(IterableDataset):
    """Samples read from shards; each shard by one worker of one rank, in a new order each epoch.

    Args:
        shards: what to read, such as file names; at least one for each rank.
        read: makes an iterator over the samples of one shard; a function of a module or a
            method, not a lambda: loading workers get it pickled.
        length: samples of all shards together, if known; the learning rate's schedule needs it,
            or else --max-steps.
        shuffle: samples to hold back and draw from at random, since a shard has an order.
        decode: makes of what `read` yields, such as the bytes of an image, what is trained on. It
            is called late: what is held back stays small, and what a resumed run had before its
            stop is read, but not decoded once more.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any], Iterator[Any]],
        length: int | None = None,
        shuffle: int = 1000,
        decode: Callable[[Any], Any] | None = None,
    ) -> None:
        self.shards, self.read, self.length, self.shuffle = shards, read, length, shuffle
        self.decode = decode
        self.rank, self.world_size, self.seed, self.epoch, self.skip = 0, 1, 0, 0, 0

    def assign(self, rank: int, world_size: int, seed: int) -> None:
        """Say which of how many ranks reads this copy."""
        self.rank, self.world_size, self.seed = rank, world_size, seed
        if not self.shards:
            raise UsageError("the training set has no shard: is data_dir the right folder?")
        if len(self.shards) < world_size:
            raise UsageError(
                f"the training set has {len(self.shards)} shard(s) for {world_size} ranks, and "
                "each rank needs at least one: make more shards or use fewer ranks"
            )

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Choose the order of shards and samples, and how many of each worker are dropped."""
        self.epoch, self.skip = epoch, skip

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, mine = (worker.num_workers, worker.id) if worker else (1, 0)
        order = list(range(len(self.shards)))
        random.Random(derive("shards", self.seed, self.epoch)).shuffle(order)
        # Ranks first, then workers: a rank has a shard even where some of its workers have none.
        order = order[self.rank :: self.world_size][mine::workers]
        draw = random.Random(derive("samples", self.seed, self.epoch, self.rank, mine))
        for number, (seed, sample) in enumerate(self._shuffled(order, draw)):
            if number < self.skip:
                yield SKIPPED
            elif self.decode:
                seed_generators(seed)
                yield self.decode(sample)
            else:
                yield sample

    def _shuffled(self, order: Sequence[int], draw: random.Random) -> Iterator[tuple[int, Any]]:
        held: list[tuple[int, Any]] = []
        for shard in order:
            for sample in self._samples(shard):
                held.append(sample)
                if len(held) > self.shuffle:
                    yield _take(held, draw)
        while held:
            yield _take(held, draw)

    def _samples(self, shard: int) -> Iterator[tuple[int, Any]]:
        """Read a shard; a sample draws by its seed, the same in whatever process reads it."""
        seed = derive("sample", self.seed, self.epoch, shard)
        samples = iter(self.read(self.shards[shard]))
        for number in count():
            seed_generators(seed + number)
            try:
                yield seed + number, next(samples)
            except StopIteration:
                return


def _take(held: list[Any], draw: random.Random) -> Any:  # noqa: ANN401 - a sample of any type
    """Remove and return a random sample, in constant time."""
    chosen = draw.randrange(len(held))
    held[chosen], held[-1] = held[-1], held[chosen]
    return held.pop()
