"""Loads the batches of each step.

The type of the dataset that data.py returns decides how ranks and workers share it:
- A map-style dataset (with `__len__` and `__getitem__`) is read in the random order of
  `EpochSampler`. A resumed run continues at the same sample, on any number of ranks.
- A `ShardStream` is read from front to back. Each shard is read by one worker of one rank.
- An iterable dataset with `state_dict` and `load_state_dict` belongs to its rank, which reads it
  without workers, and checkpoints keep its state.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ..checks import check_weight
from ..config import Settings
from ..errors import UsageError
from ..position import Place, Position
from ..ranks.world import World
from ..run.clock import CLOCK
from ..run.record import RECORDER
from .batches import EpochSampler, SeededSamples, collate_of, listeners, weights_of
from .seeds import derive, seed_generators
from .stream import SKIPPED, ShardStream
from .workers import loading_workers, started


class Loaded(NamedTuple):
    """A batch of this rank, its number of samples, and its weight in means over batches."""

    batch: Any
    samples: int
    weight: int


class StepLoader:
    """Loads this rank's training batches: a list for each step.

    Args:
        dataset: map-style, a `ShardStream`, or an iterable dataset with a state. A map-style
            dataset may have the methods `__getitems__`, which reads a whole batch, and `collate`,
            which gets that result.
        weigh: returns the weight of a batch; if None, the weight is the number of samples.

    Attributes:
        samples: the number of samples in an epoch, over all ranks; None if unknown.
        samples_per_step: the number of samples in a step, over all ranks.
        workers: the number of loading workers of this rank.
        uneven: whether ranks may have different numbers of samples, or different weights, in a
            step.

    Raises:
        UsageError: the ranks can't share the dataset, or it has too few samples or shards.
    """

    def __init__(
        self, dataset: Dataset, settings: Settings, world: World, weigh: Callable[[Any], int] | None
    ) -> None:
        self.dataset, self.weigh = dataset, weigh
        self.batch_size, self.accumulate = settings.batch_size, settings.accumulate
        self.samples_per_step = self.batch_size * self.accumulate * world.size
        self.has_state = is_stateful(dataset)
        self.is_stream = self.has_state or isinstance(dataset, ShardStream)
        self.uneven = self.is_stream or weigh is not None
        self.first: Any = None
        self.ahead: list[Loaded] = []  # the step that was loaded last
        self.ended = self.resumed = False
        options = loading_workers(0 if self.has_state else settings.workers)
        self.workers: int = options["num_workers"]
        # With workers, a thread of DataLoader pins batches. Without, `to_device` pins those that a
        # dataset has not put on the GPU itself.
        options["pin_memory"] = self.workers > 0 and world.device.type == "cuda"
        # Without its own generator, DataLoader would draw a number from the global one each epoch.
        options["generator"] = torch.Generator()
        if isinstance(dataset, ShardStream):
            dataset.batch_size = settings.batch_size
        if self.is_stream:
            if assign := getattr(dataset, "assign", None):
                assign(world.rank, world.size, settings.seed)
            self.samples = dataset.length if isinstance(dataset, ShardStream) else None
            collate = getattr(dataset, "collate", default_collate)
            counted = partial(_counted, collate)
            self.loader = DataLoader(dataset, settings.batch_size, collate_fn=counted, **options)
        elif isinstance(dataset, IterableDataset):
            raise UsageError(
                f"the training set is a {type(dataset).__name__}, an iterable dataset that ranks "
                "can't share: make it a ShardStream, or give it state_dict and load_state_dict, or "
                "a length and an index"
            )
        else:
            self.samples = len(dataset)  # type: ignore[arg-type]
            self.sampler = EpochSampler(
                self.samples, settings.batch_size, world.rank, world.size, settings.seed
            )
            self.sampler.weights = weights_of(dataset)
            options |= {"batch_sampler": self.sampler, "persistent_workers": self.workers > 0}
            options["collate_fn"] = collate_of(dataset)
            self.loader = DataLoader(SeededSamples(dataset, settings.seed), **options)
        self.place = partial(_place, settings, self.samples, self.samples_per_step)
        self.seeds = "dataset", settings.seed, world.rank

    @property
    def steps(self) -> int | None:
        """The number of steps in an epoch, of a stream about; None if it is unknown."""
        batches = (self.samples or 0) * self.accumulate // self.samples_per_step
        return -(-batches // self.accumulate) or None

    def epoch(self, position: Position) -> Iterator[list[Loaded]]:
        """Yield the batches of each remaining step of an epoch, and then empty lists.

        A map-style dataset starts after the samples that were used. A stream skips the batches of
        the steps that were taken, and decodes almost none of them. A dataset with a state goes on.
        """
        position = replace(position)  # as it is now: the loop advances it
        within = self.resumed and (self.ahead or position.epoch_steps)
        batches = iter(()) if within and self.ended else self._batches(position)
        for number in count():
            began = time.perf_counter()
            with CLOCK.during("data"):
                if number or not within:
                    if self.has_state:
                        place = self.place(position, number * self.accumulate)
                        for each in listeners(self.dataset):
                            each.set_progress(*place)
                        seed_generators(derive(*self.seeds, place.step))
                    self.ahead = list(islice(batches, self.accumulate))
                    self.ended = len(self.ahead) < self.accumulate
            if not number and not within:
                self.first = None if position.epoch_steps else next(iter(self.ahead), (None,))[0]
            self.resumed = False
            RECORDER.add("train/data_seconds", time.perf_counter() - began, 1)
            yield self.ahead

    def _batches(self, position: Position) -> Iterator[Loaded]:
        skipped = 0
        if isinstance(self.dataset, ShardStream):
            skipped = position.epoch_steps * self.accumulate
            # Workers take turns, so each of them made at least this many of the batches.
            share = skipped // max(self.workers, 1)
            self.dataset.set_epoch(position.epoch, skip=share * self.batch_size)
            begin = replace(position, step=position.step - position.epoch_steps, consumed=0)
            self.dataset.place = partial(self.place, begin)
        elif not self.has_state:
            self.sampler.consumed = position.consumed
            self.sampler.place = partial(self.place, position)
        for number, loaded in enumerate(started(self.loader, self.dataset)):
            # Samples are counted before `collate`, which may drop some.
            samples, batch = loaded if self.is_stream else (self.batch_size, loaded)
            if number >= skipped:
                weight = check_weight(self.weigh(batch)) if self.weigh else samples
                yield Loaded(batch, samples, weight)

    def padded(self, loaded: list[Loaded]) -> list[Loaded]:
        """Return a step's batches, and spare batches if some are missing.

        The ranks communicate in every forward and backward pass. So a rank that runs out of batches
        must take part in the remaining passes. A spare batch counts 0 samples, and has weight 0.
        """
        lacking = self.accumulate - len(loaded) if self.is_stream else 0
        return loaded + [Loaded(self.spare(), 0, 0)] * lacking if lacking else loaded

    def spare(self) -> Any:  # noqa: ANN401 - whatever a batch is
        """Return the first batch of the stream's epoch, to use when a rank has no more batches.

        A spare batch changes the running statistics of networks. So a resumed run, which skipped
        the first batch, must read this batch again to give the same result.
        """
        if self.first is None and isinstance(self.dataset, ShardStream):
            self.dataset.set_epoch(self.dataset.epoch)
            _, self.first = next(started(self.loader, self.dataset), (0, None))
        if self.first is None:
            raise UsageError(
                "the training set of a rank has no samples: give each rank, or each shard, about "
                "as many samples"
            )
        return self.first

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of a dataset that has one, and the step that was loaded ahead."""
        if not self.has_state:
            return None
        state: Any = self.dataset
        ahead = [tuple(each) for each in self.ahead]
        position = {"ahead": ahead, "ended": self.ended, "first": self.first}
        return {"dataset": state.state_dict(), **position}

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from what `state_dict` returned; None stands for no state."""
        if self.has_state and state:
            dataset: Any = self.dataset
            dataset.load_state_dict(state["dataset"])
            self.ahead = [Loaded(*each) for each in state["ahead"]]
            self.ended, self.first, self.resumed = state["ended"], state["first"], True

    @staticmethod
    def sizes(loaded: list[Loaded]) -> tuple[int, int]:
        """Return the number of samples and the weight of a step's batches together."""
        return sum(each.samples for each in loaded), sum(each.weight for each in loaded)

    def close(self) -> None:
        """End the loading workers. They ignore signals, so Python would wait for them at exit."""
        del self.loader


def is_stateful(dataset: Any) -> bool:  # noqa: ANN401 - any dataset
    """Return whether a dataset is an iterable one with the methods of torchdata's `Stateful`."""
    methods = ("state_dict", "load_state_dict")
    return isinstance(dataset, IterableDataset) and all(hasattr(dataset, m) for m in methods)


def _place(
    settings: Settings, samples: int | None, samples_per_step: int, position: Position, batch: int
) -> Place:
    """Return the place of the step of a batch: the batch with this number after a position."""
    steps = batch // settings.accumulate
    consumed, step = position.consumed + steps * samples_per_step, position.step + steps
    progress = replace(position, step=step, consumed=consumed).progress
    return Place(position.epoch, step, progress(settings, samples, samples_per_step))


def _counted(collate: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[int, Any]:
    """Return the number of samples and their batch; None if the first sample is SKIPPED."""
    return len(samples), None if samples[0] is SKIPPED else collate(samples)
