"""Batches of a map-style dataset: which rank reads which samples, with which random numbers."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, Sampler, Subset

from ..errors import UsageError
from ..position import Place
from .seeds import derive, seed_generators
from .workers import loading_workers, started

# The step that a sample is for, its place in the order of the epoch, and its index.
Key = tuple[Place, int, int]


class EpochSampler(Sampler[list[Key]]):
    """Yields the keys of one rank's batches.

    An epoch is a permutation of the dataset that depends only on the seed and the epoch. The
    permutation is cut into global batches, and each rank takes its part of every global batch. So
    a number of samples is enough to describe the position in an epoch, with any world size. The
    last global batch is left out if it is incomplete. With weights, an epoch has as many samples,
    but each is drawn with replacement, with a probability that its weight gives.

    Args:
        length: the number of samples in the dataset.
        batch_size: the number of samples in a batch of one rank.

    Attributes:
        weights: float64 of shape (samples,), or None.
        consumed: how many samples of the epoch all ranks together have used before.
        place: takes the number of a batch from there on, and returns the place of its step.

    Raises:
        UsageError: the dataset has fewer samples than one global batch.
    """

    def __init__(self, length: int, batch_size: int, rank: int, world_size: int, seed: int) -> None:
        self.length, self.batch_size = length, batch_size
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.consumed = 0
        self.weights: Tensor | None = None
        self.place: Callable[[int], Place] = partial(Place, 0, progress=0.0)
        if length < batch_size * world_size:
            raise UsageError(
                f"the training set has {length} samples, fewer than one batch of {batch_size} on "
                f"each of {world_size} rank(s): use a smaller batch size or fewer ranks"
            )

    def __iter__(self) -> Iterator[list[Key]]:
        generator = torch.Generator().manual_seed(derive("order", self.seed, self.place(0).epoch))
        order = torch.randperm(self.length, generator=generator)
        if self.weights is not None:  # torch.multinomial takes at most 2**24 of them
            drawn = torch.rand(self.length, dtype=torch.float64, generator=generator)
            bounds = self.weights.cumsum(0)
            order = torch.searchsorted(bounds, drawn * bounds[-1], right=True)
        whole = self.batch_size * self.world_size
        for number, first in enumerate(range(self.consumed, self.length - whole + 1, whole)):
            mine, place = first + self.rank * self.batch_size, self.place(number)
            indices = order[mine : mine + self.batch_size].tolist()
            yield [(place, number, index) for number, index in enumerate(indices, mine)]


class SeededSamples(Dataset):
    """Wraps a map-style dataset, so that a sample draws the same random numbers in any process.

    The numbers depend on the epoch and on the place of the sample in its order. If the dataset has
    `__getitems__`, which reads a whole batch at once, it draws with the seed of the first sample.
    """

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.listeners = [*listeners(dataset)]

    def __getitems__(self, keys: Sequence[Key]) -> Any:  # noqa: ANN401 - the dataset's own type
        """Return the samples with these keys, which are all of one step."""
        place, first, _ = keys[0]
        seed = derive("sample", self.seed, place.epoch)
        for each in self.listeners:
            each.set_progress(*place)
        indices = [index for _, _, index in keys]
        if hasattr(unwrapped(self.dataset), "__getitems__"):
            seed_generators(seed + first)
            return self.dataset.__getitems__(indices)  # type: ignore[attr-defined]
        samples = []
        for number, index in enumerate(indices, first):
            seed_generators(seed + number)
            samples.append(self.dataset[index])
        return samples


def unwrapped(dataset: Dataset) -> Dataset:
    """Return the dataset inside a Subset of torch, such as one of `random_split`.

    A Subset reads its samples with the methods of that dataset.
    """
    while isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        dataset = dataset.dataset
    return dataset


def listeners(dataset: Any) -> Iterator[Any]:  # noqa: ANN401 - any dataset
    """Yield what has a method `set_progress`: a dataset, what it wraps, and the owner of `decode`.

    A Subset and a ConcatDataset wrap other datasets; a ShardStream may decode with a method.
    """
    if hasattr(dataset, "set_progress"):
        yield dataset
    if isinstance(dataset, Subset):
        yield from listeners(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        yield from chain.from_iterable(map(listeners, dataset.datasets))
    elif (owner := getattr(getattr(dataset, "decode", None), "__self__", dataset)) is not dataset:
        yield from listeners(owner)


def weights_of(dataset: Any) -> Tensor | None:  # noqa: ANN401 - any dataset
    """Return the attribute `weights` of a map-style dataset, or of the datasets that it wraps.

    Returns:
        float64 of shape (samples,), or None if no sample has a weight.

    Raises:
        UsageError: there is not one finite weight >= 0 for each sample, or all are 0.
    """
    if (given := getattr(dataset, "weights", None)) is not None:
        weights = torch.as_tensor(given, dtype=torch.float64)
        good = weights.shape == (len(dataset),) and bool((weights >= 0).all())
        if not good or not 0 < weights.sum() < torch.inf:
            raise UsageError(
                f"`weights` of {type(dataset).__name__} in data.py must be one number >= 0 for "
                f"each of its {len(dataset)} samples, not all 0, but has shape "
                f"{tuple(weights.shape)} and the sum {weights.sum():g}"
            )
        return weights
    if isinstance(dataset, Subset) and (inner := weights_of(dataset.dataset)) is not None:
        return inner[torch.as_tensor(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts: list[Any] = [*map(weights_of, dataset.datasets)]
        if len({each is None for each in parts}) > 1:
            raise UsageError(
                "only some parts of a ConcatDataset have `weights`: give all parts some"
            )
        return None if parts[0] is None else torch.cat(parts)
    return None


def collate_of(dataset: Dataset) -> Callable[[Any], Any] | None:
    """Return the method `collate` of a map-style dataset, or of the dataset that it wraps.

    The batches of a ConcatDataset are lists of samples. A `collate` for what `__getitems__` returns
    does not fit them.

    Raises:
        UsageError: the parts of a ConcatDataset have different methods.
    """
    inner = unwrapped(dataset)
    collate = getattr(dataset, "collate", getattr(inner, "collate", None))
    parts = inner.datasets if isinstance(inner, ConcatDataset) else []
    if collate or any(hasattr(unwrapped(each), "__getitems__") for each in parts):
        return collate
    found = {getattr(each, "__func__", each): each for each in map(collate_of, parts)}
    if len(found) > 1:
        raise UsageError(
            "the parts of a ConcatDataset of data.py have different `collate`: set the attribute "
            "`collate` of the ConcatDataset"
        )
    return next(iter(found.values()), None)


def evaluation_batches(
    dataset: Dataset, indices: Sequence[int], batch_size: int, workers: int | Literal["auto"]
) -> Iterator[Any]:
    """Return batches of the samples with these indices, in this order.

    The last batch may be smaller.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=BatchSampler(indices, batch_size, drop_last=False),
        **loading_workers(workers),
        collate_fn=collate_of(dataset),
    )
    return started(loader, dataset)
