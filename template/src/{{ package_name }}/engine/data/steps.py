"""The batches of each step."""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from ..checks import check_weight
from ..config import Settings
from ..ranks.world import World
from ..run.record import RECORDER
from .batches import TrainBatches


class Loaded(NamedTuple):
    """A batch of this rank, its number of samples, and its weight in means."""

    batch: Any
    samples: int
    weight: int


class StepLoader:
    """This rank's batches, a list for each step.

    Args:
        dataset: the training set.
        settings: of the run. world: the ranks.
        weigh: returns the weight of a batch; None: its number of samples.

    Attributes:
        samples: of all ranks in an epoch, None if unknown.
        workers: number of loading workers.
        uneven: whether ranks may have different samples or weights in a step.
    """

    def __init__(
        self, dataset: Dataset, settings: Settings, world: World, weigh: Callable[[Any], int] | None
    ) -> None:
        self.batches = TrainBatches(
            dataset,
            settings.batch_size,
            world.rank,
            world.size,
            settings.seed,
            settings.workers,
            pin=world.device.type == "cuda",
        )
        self.samples, self.accumulate = self.batches.samples, settings.accumulate
        self.weigh, self.uneven = weigh, self.batches.uneven or weigh is not None
        self.workers = self.batches.loader.num_workers

    def close(self) -> None:
        """End the loading workers."""
        self.batches.close()

    def epoch(self, epoch: int, consumed: int, epoch_steps: int) -> Iterator[list[Loaded]]:
        """Yield the batches of each remaining step of an epoch, then empty lists.

        Args:
            epoch: the epoch.
            consumed: samples of this epoch that all ranks had before.
            epoch_steps: steps of this epoch taken before.
        """
        batches = self.batches.epoch(epoch, consumed, epoch_steps * self.accumulate)
        while True:
            began = time.perf_counter()
            loaded = [
                Loaded(batch, samples, check_weight(self.weigh(batch)) if self.weigh else samples)
                for samples, batch in islice(batches, self.accumulate)
            ]
            RECORDER.add("train/data_seconds", time.perf_counter() - began, 1)
            yield loaded

    def padded(self, loaded: list[Loaded]) -> list[Loaded]:
        """Return a step's batches, filled up with spare batches that count no sample.

        A rank whose shards are shorter has too few batches, but must take part in every forward and
        backward pass: the ranks communicate in them.
        """
        lacking = self.accumulate - len(loaded) if self.batches.uneven else 0
        return loaded + [Loaded(self.batches.spare(), 0, 0)] * lacking if lacking else loaded

    @staticmethod
    def sizes(loaded: list[Loaded]) -> tuple[int, int]:
        """Return the samples and the weight of a step's batches."""
        return sum(each.samples for each in loaded), sum(each.weight for each in loaded)
