"""Loss and accuracy over a whole dataset, exact on any number of ranks."""

import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from . import model
from .config import Settings
from .distributed import World, autocast, to_device
from .recording import STORE
from .sharding import evaluation_batches

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


@torch.no_grad()
def evaluate(
    network: nn.Module,
    dataset: Dataset,
    settings: Settings,
    world: World,
    pictures: "Pictures | None" = None,
) -> tuple[float, float]:
    """Return the mean loss and the accuracy over a map-style dataset; every rank calls this.

    Each sample is counted once, on one rank; the sums meet in one all-reduce. All ranks call the
    network as often, since with FSDP they put it together for each call.
    """
    if world.size > 1:
        # Batch statistics are each rank's own during training: use rank 0's, as checkpoints do.
        for buffer in network.buffers():
            torch.distributed.broadcast(buffer, src=0)
    network.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    count = 0
    for batch, counts in _as_many_on_all_ranks(dataset, settings, world):
        inputs, targets = batch
        targets = targets.to(world.device)
        with STORE.paused(), autocast(world.device, settings.precision):
            outputs = network(to_device(inputs, world.device)).float()
            loss = model.loss(outputs, targets, label_smoothing=0.0) * len(targets)
        if not counts:
            continue
        correct = model.count_correct(outputs, targets)
        sums += torch.stack([loss, correct.to(loss.dtype)]).cpu()
        count += len(targets)
        if pictures:
            pictures.add(inputs, outputs, targets)
    network.train()
    loss_sum, correct_sum, total = world.sum([*sums.tolist(), count])
    return loss_sum / total, correct_sum / total


def _as_many_on_all_ranks(
    dataset: Dataset, settings: Settings, world: World
) -> Iterator[tuple[Any, bool]]:
    """Yield this rank's batches, and then others, with False, until rank 0 has had all of its."""
    size, ranks, workers = settings.test_batch_size, world.size, settings.workers
    batches = evaluation_batches(dataset, size, world.rank, ranks, workers)
    yield from ((batch, True) for batch in batches)
    most, mine = (
        math.ceil(len(range(rank, len(dataset), ranks)) / size)  # type: ignore[arg-type]
        for rank in (0, world.rank)
    )
    if mine < most:
        yield next(evaluation_batches(dataset, 1, 0, 1, 0)), False


class Pictures:
    """What figures.py needs of an evaluation. A mistake in that file costs the pictures only."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None
        self.first: tuple[object, Tensor, Tensor] | None = None
        self.failed = False

    def add(self, inputs: object, outputs: Tensor, targets: Tensor) -> None:
        """Count a batch."""
        if self.failed:
            return
        try:
            from . import figures

            counts = figures.count(outputs, targets).cpu()
            self.counts = counts if self.counts is None else self.counts + counts
        except Exception:
            self._fail()
        if self.first is None:
            self.first = (inputs, outputs.cpu(), targets.cpu())

    def draw(self, world: World) -> "dict[str, Figure]":
        """Return the pictures on rank 0, none on the others; every rank must call this."""
        counts = [each for each in world.gather(self.counts) if each is not None]
        if self.failed or not world.is_main or not counts or self.first is None:
            return {}
        try:
            from . import figures

            return figures.draw(sum(counts[1:], counts[0]), *self.first)
        except Exception:
            self._fail()
            return {}

    def _fail(self) -> None:
        self.failed = True
        log.exception("figures.py failed, so there are no pictures of this evaluation")
