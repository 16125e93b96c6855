"""Training sets that are split into shards, each of which is read from front to back."""

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, count, islice, repeat
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from ..errors import UsageError
from ..position import Place
from .batches import listeners
from .seeds import derive, seed_generators

SKIPPED = object()
"""Stands for a sample that a resumed run has used before its stop."""
END = object()


class ShardStream(IterableDataset):
    """A dataset of shards. Each shard is read by one worker of one rank.

    The shards have a new random order in each epoch.

    Args:
        shards: the shards, such as file names; at least one for each rank.
        read: takes a shard, and returns an iterator over its samples. Loading workers get it as a
            pickle, so it must be a function of a module or a method, not a lambda.
        length: the number of samples in all shards together, if known. The schedule of the learning
            rate needs it, or --max-steps.
        shuffle: the size of the shuffle buffer, in samples: each sample is drawn at random from the
            buffer, since the samples in a shard may be sorted.
        decode: converts what `read` yields, such as the bytes of an image, to a sample. It is
            called after the shuffling, so that the buffer stays small. A resumed run does not
            decode the samples that it has used before its stop.
        sizes: the number of samples in each shard, if known. `length` is then their sum, and a
            resumed run does not read shards of which it has used all samples.
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
        if decode is None and hasattr(getattr(read, "__self__", None), "set_progress"):
            raise UsageError(
                "`read` of a ShardStream reads ahead of the steps, where set_progress has no use: "
                "give the stream a method `decode` of the same object"
            )
        self.shards, self.read, self.shuffle, self.decode = shards, read, shuffle, decode
        self.sizes, self.length = sizes, length if sizes is None else sum(sizes)
        self.rank, self.world_size, self.seed, self.epoch, self.skip = 0, 1, 0, 0, 0
        self.batch_size, self.place = 1, partial(Place, 0, progress=0.0)

    def assign(self, rank: int, world_size: int, seed: int) -> None:
        """Set the rank that uses this object, the world size, and the seed of the run.

        Raises:
            UsageError: there are fewer shards than ranks, or the number of `sizes` is not the
                number of shards.
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
        """Set the epoch, from 0, and the number of samples that each worker skips."""
        self.epoch, self.skip = epoch, skip

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        workers, mine = (worker.num_workers, worker.id) if worker else (1, 0)
        order = list(range(len(self.shards)))
        random.Random(derive("shards", self.seed, self.epoch)).shuffle(order)
        # Shards are distributed first over ranks, and then over workers. So each rank has a shard,
        # even if some of its workers have none.
        order = order[self.rank :: self.world_size][mine::workers]
        draws = derive("samples", self.seed, self.epoch, self.rank, mine)
        finished, told = self._finished(order, draws), [*listeners(self)]
        samples = chain.from_iterable(self._samples(shard, finished) for shard in order)
        for number, (seed, sample) in enumerate(self._shuffled(samples, draws)):
            if number < self.skip:
                yield SKIPPED
                continue
            if told and number % self.batch_size == 0:
                # Workers take turns to make batches.
                place = self.place(number // self.batch_size * workers + mine)
                for each in told:
                    each.set_progress(*place)
            if self.decode:
                seed_generators(seed)
                yield self.decode(sample)
            else:
                yield sample

    def _shuffled(self, samples: Iterable[Any], seed: int) -> Iterator[Any]:
        """Yield samples in the order in which they are drawn from the shuffle buffer."""
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
        """Return the shards of which all samples are skipped; none if the sizes are unknown.

        The draws from the shuffle buffer depend on the number of samples in it, not on the samples.
        So this repeats the draws with the index of the shard in place of each sample.
        """
        if self.sizes is None:
            return ()
        numbers = chain.from_iterable(repeat(shard, self.sizes[shard]) for shard in order)
        skipped = Counter(islice(self._shuffled(numbers, draws), self.skip))
        return {shard for shard, samples in skipped.items() if samples == self.sizes[shard]}

    def _samples(self, shard: int, finished: Collection[int]) -> Iterator[tuple[int, Any]]:
        """Yield the samples of a shard, each after its seed, which is the same in every process.

        A finished shard is not read. None stands for each of its samples, which will be skipped.
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
