"""Which rank and which worker reads which samples, and where a resumed run goes on.

The type of the dataset that data.py returns decides:
- A map-style dataset (with a length and an index) is read through `EpochSampler`, in any order. A
  resumed run goes on at the same sample on any number of ranks.
- A `ShardStream` is read from front to back, each shard by one worker of one rank.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    default_collate,
)

from ..errors import UsageError
from .seeds import derive, seed_generators
from .stream import SKIPPED, ShardStream
from .workers import loading_workers, started

Key = tuple[int, int]
"""The epoch and the index of a sample."""


class EpochSampler(Sampler[list[Key]]):
    """Batches of keys for one rank.

    An epoch is a permutation of the dataset that depends on seed and epoch alone. It is cut into
    global batches, and each rank takes its part of every one. So the position in an epoch is a
    number of samples, on any world size. The last, incomplete global batch is left out.
    """

    def __init__(
        self, length: int, batch_size: int, rank: int = 0, world_size: int = 1, seed: int = 0
    ) -> None:
        self.length, self.batch_size = length, batch_size
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.epoch, self.consumed = 0, 0
        if length < batch_size * world_size:
            raise UsageError(
                f"the training set has {length} samples, fewer than one batch of {batch_size} on "
                f"each of {world_size} rank(s): use a smaller batch size or fewer ranks"
            )

    def set_epoch(self, epoch: int, consumed: int = 0) -> None:
        """Choose the epoch, and how many samples of it all ranks together had already."""
        self.epoch, self.consumed = epoch, consumed

    def __iter__(self) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(derive("order", self.seed, self.epoch))
        order = torch.randperm(self.length, generator=generator)
        whole = self.batch_size * self.world_size
        for first in range(self.consumed, self.length - whole + 1, whole):
            mine = first + self.rank * self.batch_size
            indices = order[mine : mine + self.batch_size].tolist()
            yield [(self.epoch, index) for index in indices]

    def __len__(self) -> int:
        return (self.length - self.consumed) // (self.batch_size * self.world_size)


class SeededSamples(Dataset):
    """A map-style dataset whose samples draw the same random numbers in every process.

    A dataset that reads a whole batch at once draws with the seed of the first sample.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, keys: Sequence[Key]) -> Any:  # noqa: ANN401 - what the dataset has
        """Return the samples of some keys, all of one epoch."""
        seed = derive("sample", self.seed, keys[0][0])
        indices = [index for _, index in keys]
        if read := getattr(self.dataset, "__getitems__", None):
            seed_generators(seed + indices[0])
            return read(indices)
        samples = []
        for index in indices:
            seed_generators(seed + index)
            samples.append(self.dataset[index])
        return samples


class _Counted:
    """A collate function that returns the number of samples with each batch."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self.collate = collate or default_collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return len(samples), None if samples[0] is SKIPPED else self.collate(samples)


class TrainBatches:
    """The training batches of one rank, epoch by epoch.

    Args:
        dataset: map-style or `ShardStream`. A map-style dataset may have `__getitems__` (a whole
            batch at once) and `collate`, which gets what `__getitems__` returns.
        batch_size: samples in a batch of this rank.
        workers: see `loading_workers`.
        pin: copy batches to page-locked memory, for GPUs.

    Attributes:
        samples: of all ranks in an epoch, None if unknown.
        uneven: whether other ranks may have more batches.

    Raises:
        UsageError: the ranks can't share the dataset, or it has too few samples or shards.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        workers: int | Literal["auto"],
        pin: bool,
    ) -> None:
        self.dataset, self.rank, self.batch_size = dataset, rank, batch_size
        self.first: Any = None
        self.uneven = isinstance(dataset, ShardStream)
        options: dict[str, Any] = {
            **loading_workers(workers, dataset),
            "pin_memory": pin,
            "collate_fn": getattr(dataset, "collate", None),
            # Without it, each iterator would draw from the global generator.
            "generator": torch.Generator(),
        }
        if isinstance(dataset, ShardStream):
            dataset.assign(rank, world_size, seed)
            self.samples = dataset.length
            options["collate_fn"] = _Counted(options["collate_fn"])
            self.loader = DataLoader(dataset, batch_size=batch_size, **options)
        elif isinstance(dataset, IterableDataset):
            raise UsageError(
                f"the training set is a {type(dataset).__name__}, an iterable dataset that ranks "
                "can't share: make it a ShardStream, or give it a length and an index"
            )
        else:
            self.samples = len(dataset)  # type: ignore[arg-type]
            self.sampler = EpochSampler(self.samples, batch_size, rank, world_size, seed)
            options["persistent_workers"] = options["num_workers"] > 0
            seeded = SeededSamples(dataset, seed)
            self.loader = DataLoader(seeded, batch_sampler=self.sampler, **options)

    def epoch(self, epoch: int, consumed: int = 0, batches: int = 0) -> Iterator[tuple[int, Any]]:
        """Yield the remaining batches of an epoch, each with its number of samples.

        For a map-style dataset, samples are counted before `collate`, which may drop some.

        Args:
            epoch: the epoch.
            consumed: samples of it that all ranks had before; for a map-style dataset.
            batches: batches of it that this rank had before; for a stream, which reads them again
                but decodes almost none.
        """
        if isinstance(self.dataset, ShardStream):
            # Workers take turns, so each made at least this many of the batches.
            share = batches // max(self.loader.num_workers, 1)
            self.dataset.set_epoch(epoch, skip=share * self.batch_size)
        else:
            self.sampler.set_epoch(epoch, consumed)
            batches = 0
        for number, loaded in enumerate(started(self.loader, self.dataset)):
            samples, batch = loaded if self.uneven else (self.batch_size, loaded)
            if self.uneven and number == 0:
                self.first = batch
            if number >= batches:
                yield samples, batch

    def spare(self) -> Any:  # noqa: ANN401 - whatever a batch is
        """Return the first batch of a stream's epoch, for a rank that has no more batches.

        It changes running statistics of networks. So a resumed run, which skipped this batch, reads
        it again.

        Raises:
            UsageError: this rank has no sample.
        """
        if self.first is None and isinstance(self.dataset, ShardStream):
            self.dataset.set_epoch(self.dataset.epoch)
            _, self.first = next(started(self.loader, self.dataset), (0, None))
        if self.first is None:
            raise UsageError(f"the shards of rank {self.rank} hold no sample: make them even")
        return self.first

    def close(self) -> None:
        """End the loading workers: they ignore signals, and Python would wait for them at exit."""
        del self.loader


def evaluation_batches(
    dataset: Dataset, indices: Sequence[int], batch_size: int, workers: int | Literal["auto"]
) -> Iterator[Any]:
    """Return batches of the samples with these indices, in this order; the last may be smaller."""
    loader = DataLoader(
        dataset,
        batch_sampler=BatchSampler(indices, batch_size, drop_last=False),
        **loading_workers(workers, dataset),
        collate_fn=getattr(dataset, "collate", None),
    )
    return started(loader, dataset)
