"""Training sets that are read from front to back, shard by shard."""

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, count, groupby, islice
from operator import itemgetter
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..errors import UsageError
from .seeds import derive, seed_generators

SKIPPED = object()
"""Stands for a sample of a batch that a resumed run drops."""

Place = tuple[int, int]
"""Where a sample is: its shard, counted in the order of an epoch, and its number in the shard."""


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
        sizes: samples of each shard, if known: the length is their sum, and a resumed run reads no
            shard of which nothing is held back.
    """

    def __init__(
        self,
        shards: Sequence[Any],
        read: Callable[[Any], Iterator[Any]],
        length: int | None = None,
        shuffle: int = 1000,
        decode: Callable[[Any], Any] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.shards, self.read, self.shuffle, self.decode = shards, read, shuffle, decode
        self.sizes, self.length = sizes, length if sizes is None else sum(sizes)
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
        if self.sizes is not None and len(self.sizes) != len(self.shards):
            raise UsageError(
                f"the training set has {len(self.shards)} shard(s), and the sizes of "
                f"{len(self.sizes)}: it must be told that of each"
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
        if self.sizes is not None and self.skip:
            drawn = self._resumed(order, draw, self.sizes)
        else:
            drawn = self._shuffled(chain.from_iterable(map(self._samples, order)), draw, [])
        for number, (seed, sample) in enumerate(drawn):
            if number < self.skip:
                yield SKIPPED
            elif self.decode:
                seed_generators(seed)
                yield self.decode(sample)
            else:
                yield sample

    def _shuffled(
        self, samples: Iterable[Any], draw: random.Random, held: list[Any]
    ) -> Iterator[Any]:
        """Yield samples as they are drawn from those that are held back."""
        for sample in samples:
            held.append(sample)
            if len(held) > self.shuffle:
                yield _take(held, draw)
        while held:
            yield _take(held, draw)

    def _resumed(
        self, order: Sequence[int], draw: random.Random, sizes: Sequence[int]
    ) -> Iterator[tuple[int, Any]]:
        """Yield as many places as are skipped, then the samples that are left."""
        places = (
            (which, number) for which, shard in enumerate(order) for number in range(sizes[shard])
        )
        held: list[Any] = []
        # Which sample is drawn depends on how many are held back, not on what they are.
        yield from islice(self._shuffled(places, draw, held), self.skip)
        back = sorted(held)
        samples = self._at(chain(back, places), order)
        found = dict(zip(back, samples, strict=False))
        held[:] = [found[place] for place in held]
        yield from self._shuffled(samples, draw, held)

    def _at(self, places: Iterable[Place], order: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Read the samples at some places, which are in the order of an epoch."""
        for which, group in groupby(places, itemgetter(0)):
            yield from self._samples(order[which], {number for _, number in group})

    def _samples(
        self, shard: int, wanted: Collection[int] | None = None
    ) -> Iterator[tuple[int, Any]]:
        """Read a shard; a sample draws by its seed, the same in whatever process reads it."""
        seed = derive("sample", self.seed, self.epoch, shard)
        samples = iter(self.read(self.shards[shard]))
        for number in count():
            seed_generators(seed + number)
            try:
                sample = next(samples)
            except StopIteration:
                break
            if wanted is None or number in wanted:
                yield seed + number, sample
        if self.sizes is not None and number != self.sizes[shard]:
            raise UsageError(
                f"shard {self.shards[shard]} has {number} sample(s), not {self.sizes[shard]} as "
                "the sizes say: correct them, or leave them out"
            )


def _take(held: list[Any], draw: random.Random) -> Any:  # noqa: ANN401 - a sample of any type
    """Remove and return a random sample, in constant time."""
    chosen = draw.randrange(len(held))
    held[chosen], held[-1] = held[-1], held[chosen]
    return held.pop()
