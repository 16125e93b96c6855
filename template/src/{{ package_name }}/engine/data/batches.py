"""Which rank and which worker reads which samples, and where to go on after a stop.

Two ways, chosen by the type of the dataset that data.py returns:
- a map-style dataset (it has a length and an index) is read through `EpochSampler`: any order,
  resume behind the same samples on any world size. Best for data in memory or in files that are
  opened one by one.
- a `ShardStream` is read from front to back, each shard by one reader. Best for large archives and
  for data that can only be streamed.
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
"""What a sample is asked for by: the epoch and its index."""


class EpochSampler(Sampler[list[Key]]):
    """Batches of keys for one rank.

    An epoch is one permutation of the dataset, made from seed and epoch alone, cut into global
    batches; each rank takes its part of every one. So a place in the epoch is a number of samples,
    whatever the world size. The last, incomplete global batch is left out: a different one in each
    epoch.
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
        """Choose the epoch's permutation, and how many samples of it all ranks had already."""
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
    """A map-style dataset in which a sample draws the same random numbers whoever reads it.

    A dataset that reads a whole batch at once draws those of the batch's first sample.
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
        return [self._read(index, seed) for index in indices]

    def _read(self, index: int, seed: int) -> Any:  # noqa: ANN401
        seed_generators(seed + index)
        return self.dataset[index]


class _Counted:
    """A collate function whose batches come with the number of their samples."""

    def __init__(self, collate: Callable[[list[Any]], Any] | None) -> None:
        self.collate = collate or default_collate

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        return len(samples), None if samples[0] is SKIPPED else self.collate(samples)


class TrainBatches:
    """One rank's training batches of one epoch after the other.

    Args:
        dataset: map-style or `ShardStream`. A map-style dataset may have `__getitems__` (a whole
            batch at once) and then `collate`, which gets what that returns.
        batch_size: samples of a batch of this rank.
        workers: as `loading_workers` has it.
        pin: copy batches to page-locked memory, for GPUs.

    Attributes:
        samples: of all ranks in an epoch, None where it is not known.
        uneven: whether other ranks may have more batches.
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
            # Its own: to ask for a batch draws from no other.
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
        """Yield the batches of an epoch that are left, each with its number of samples.

        Of a map-style dataset these are the indices, equally many on each rank: `collate` may have
        left some out, or have made several of each.

        Args:
            epoch: the epoch.
            consumed: samples that all ranks had of it before: where a map-style dataset goes on.
            batches: batches that this rank had of it before: a stream reads them once more, and
                decodes next to none of them.
        """
        if isinstance(self.dataset, ShardStream):
            # Of each worker, batches are dropped that it has in any case among these.
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
        """Return a stream's first batch of the epoch, for a rank that has no more.

        It changes what networks keep, such as running statistics, and other ranks may see it. So a
        resumed run, which skipped it, reads it again.

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
        """End the loading workers. They ignore signals, so Python would wait for them at exit."""
        del self.loader


def evaluation_batches(
    dataset: Dataset, indices: Sequence[int], batch_size: int, workers: int | Literal["auto"]
) -> Iterator[Any]:
    """Return batches of some samples of a map-style dataset, in their order, unpadded."""
    loader = DataLoader(
        dataset,
        batch_sampler=BatchSampler(indices, batch_size, drop_last=False),
        **loading_workers(workers, dataset),
        collate_fn=getattr(dataset, "collate", None),
    )
    return started(loader, dataset)
