"""The batches of each step."""

import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from ..config import Settings
from ..ranks.world import World
from .batches import TrainBatches


class Loaded(NamedTuple):
    """A batch of this rank: its number of samples, and how much it counts in means."""

    batch: Any
    samples: int
    weight: int


class StepLoader:
    """This rank's batches, a list for each step.

    Args:
        dataset: the training set.
        settings, world: as everywhere.
        weigh: how much a batch counts; None: as many as it has samples.

    Attributes:
        samples: of all ranks in an epoch, None where it is not known.
        workers: processes that load.
        uneven: whether the steps of other ranks may have other samples or weights.
        waited: seconds that the last step's batches were waited for.
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
        self.waited = 0.0

    def close(self) -> None:
        """End the loading workers."""
        self.batches.close()

    def epoch(self, epoch: int, consumed: int, epoch_steps: int) -> Iterator[list[Loaded]]:
        """Yield the batches of each step that is left of an epoch, then empty lists.

        Args:
            epoch: the epoch.
            consumed, epoch_steps: samples of all ranks, and steps, taken of this epoch.
        """
        batches = self.batches.epoch(epoch, consumed, epoch_steps * self.accumulate)
        while True:
            began = time.perf_counter()
            loaded = [
                Loaded(batch, samples, self.weigh(batch) if self.weigh else samples)
                for samples, batch in islice(batches, self.accumulate)
            ]
            self.waited = time.perf_counter() - began
            yield loaded

    def padded(self, loaded: list[Loaded]) -> list[Loaded]:
        """Return a step's batches, with spare ones of no samples where this rank has too few.

        Its shards were shorter. It takes part in each forward and backward pass, at which ranks may
        meet, so that the others need not stop.
        """
        lacking = self.accumulate - len(loaded) if self.batches.uneven else 0
        return loaded + [Loaded(self.batches.spare(), 0, 0)] * lacking if lacking else loaded

    @staticmethod
    def sizes(loaded: list[Loaded]) -> tuple[int, int]:
        """Return the samples and the weight of a step's batches."""
        return sum(each.samples for each in loaded), sum(each.weight for each in loaded)
