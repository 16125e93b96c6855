"""Training sets that are read from front to back, shard by shard."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, count, islice, repeat
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..errors import UsageError
from .seeds import derive, seed_generators

SKIPPED = object()
"""Stands for a sample that a resumed run had before its stop."""
END = object()


class ShardStream(IterableDataset):
    """Samples read from shards; each shard by one worker of one rank, in a new order each epoch.

    Args:
        shards: what to read, such as file names; at least one for each rank.
        read: makes an iterator over the samples of one shard; a function of a module or a
            method, not a lambda: loading workers get it pickled.
        length: samples of all shards together, if known; the learning rate's schedule needs it,
            or else --max-steps.
        shuffle: samples to hold back and draw from at random, since a shard has an order.
        decode: converts what `read` yields, such as the bytes of an image, to a sample. It is
            called after the shuffling, so that the samples held back stay small; a resumed run does
            not decode again what it had before its stop.
        sizes: samples of each shard, if known. The length is their sum, and a resumed run does not
            read a shard again if it had all of its samples.
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
        """Set the rank that reads this copy, the number of ranks, and the seed of the run.

        Raises:
            UsageError: there are fewer shards than ranks, or not one size for each shard.
        """
        self.rank, self.world_size, self.seed = rank, world_size, seed
        if len(self.shards) < world_size:
            raise UsageError(
                f"the training set has {len(self.shards)} shard(s) for {world_size} rank(s), and "
                "each rank needs at least one: make more shards, use fewer ranks, or correct "
                "data_dir"
            )
        if self.sizes is not None and len(self.sizes) != len(self.shards):
            raise UsageError(
                f"the training set has {len(self.shards)} shard(s), but {len(self.sizes)} sizes: "
                "give the size of each shard"
            )

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Choose the epoch, and how many samples each worker skips of it."""
        self.epoch, self.skip = epoch, skip

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, mine = (worker.num_workers, worker.id) if worker else (1, 0)
        order = list(range(len(self.shards)))
        random.Random(derive("shards", self.seed, self.epoch)).shuffle(order)
        # Ranks first, then workers: a rank has a shard even where some of its workers have none.
        order = order[self.rank :: self.world_size][mine::workers]
        draws = derive("samples", self.seed, self.epoch, self.rank, mine)
        finished = self._finished(order, draws)
        samples = chain.from_iterable(self._samples(shard, finished) for shard in order)
        for number, (seed, sample) in enumerate(self._shuffled(samples, draws)):
            if number < self.skip:
                yield SKIPPED
            elif self.decode:
                seed_generators(seed)
                yield self.decode(sample)
            else:
                yield sample

    def _shuffled(self, samples: Iterable[Any], seed: int) -> Iterator[Any]:
        """Yield samples in the order in which they are drawn from those held back."""
        draw, held = random.Random(seed), list[Any]()
        for sample in chain(samples, repeat(END)):
            if sample is not END:
                held.append(sample)
                if len(held) <= self.shuffle:
                    continue
            elif not held:
                return
            chosen = draw.randrange(len(held))
            held[chosen], held[-1] = held[-1], held[chosen]
            yield held.pop()

    def _finished(self, order: Sequence[int], draws: int) -> Collection[int]:
        """Return the shards of which all samples are skipped, as far as sizes are known.

        Which sample is drawn depends on how many are held back, not on what they are. So the draws
        of the skipped samples are repeated with the number of the shard in place of each sample.
        """
        if self.sizes is None:
            return ()
        numbers = chain.from_iterable(repeat(shard, self.sizes[shard]) for shard in order)
        skipped = Counter(islice(self._shuffled(numbers, draws), self.skip))
        return {shard for shard, samples in skipped.items() if samples == self.sizes[shard]}

    def _samples(self, shard: int, finished: Collection[int]) -> Iterator[tuple[int, Any]]:
        """Yield the samples of a shard, each with its seed, the same in every process.

        A finished shard is not read: its samples are skipped, and None stands for each.
        """
        if self.sizes is not None and shard in finished:
            yield from repeat((0, None), self.sizes[shard])
            return
        seed = derive("sample", self.seed, self.epoch, shard)
        samples = iter(self.read(self.shards[shard]))
        for number in count():
            seed_generators(seed + number)
            sample = next(samples, END)
            if sample is END:
                break
            yield seed + number, sample
        if self.sizes is not None and number != self.sizes[shard]:
            raise UsageError(
                f"shard {self.shards[shard]} has {number} sample(s), not {self.sizes[shard]} as "
                "the sizes say: correct them, or leave them out"
            )
