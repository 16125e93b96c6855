"""Finds ranks that are slower than the others for a long time, by the time of forward passes.

In the backward pass of DDP, all ranks wait for the slowest one, so only forward passes differ. With
FSDP, ranks also wait for each other in the forward pass, so a slow rank can't be found.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median_low
from typing import TYPE_CHECKING

from ..engine.errors import note_bad_nodes
from ..engine.run.clock import CLOCK

if TYPE_CHECKING:
    from ..engine import Training

log = logging.getLogger(__name__)

LIMIT = 1.15  # a slow rank takes more than this many times the median of all ranks,
LINES, SECONDS = 10, 60.0  # at this many log lines in a row, and for this many seconds


class Plugin:
    """Compares the ranks at each log line.

    Attributes:
        passes: the seconds of this rank's forward passes since the last log line.
        weight: the weight of the batches in these passes.
        said: the ranks that were named.
    """

    def __init__(self, training: "Training") -> None:
        self.training, self.world = training, training.world
        self.compares = self.world.size > 1 and training.settings.strategy == "ddp"
        self.passes: list[float] = []
        self.weight = 0
        self.said: set[int] = set()
        self.streaks: dict[int, tuple[int, float]] = {}

    def on_start(self, _training: "Training") -> None:
        """Begin to measure forward passes."""
        if self.compares:
            CLOCK.marks.append(self._timed)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Measure a forward pass.

        The measurement makes a GPU wait. So on a GPU, only steps with a log line are measured.
        """
        device, step = self.world.device, self.training.position.step + 1
        logged = step % self.training.settings.log_every == 0
        if name != "forward" or not (device.type == "cpu" or logged):
            yield
            return
        began = _now(device.type)
        yield
        self.passes.append(_now(device.type) - began)

    def on_step(self, training: "Training") -> None:
        """Add up the weights of this rank's batches."""
        self.weight += sum(each.weight for each in training.updater.batches)

    def on_log(self, training: "Training") -> None:
        """Compare the ranks, on rank 0, and record the time of forward passes."""
        if not self.passes:  # the same on all ranks
            return
        from ..engine.run.record import record

        mean = fmean(self.passes)
        record("system/forward_seconds", mean, weight=len(self.passes))
        found = self.world.gather((mean, self.weight))
        self.passes, self.weight = [], 0
        if self.world.is_main:
            self._compare(training, *zip(*found, strict=True))

    def _compare(
        self, training: "Training", means: Sequence[float], weights: Sequence[int]
    ) -> None:
        by_weight = [mean / max(weight, 1e-9) for mean, weight in zip(means, weights, strict=True)]
        # The lower median: if half of the ranks are slow, it is the time of a fast rank.
        median, median_by_weight, now = median_low(means), median_low(by_weight), time.monotonic()
        for rank, mean in enumerate(means):
            # A slow rank exceeds both medians. A rank with longer texts exceeds only the median of
            # the time, and one with shorter texts only the median of the time by weight.
            slow = mean > LIMIT * median and by_weight[rank] > LIMIT * median_by_weight
            lines, since = self.streaks.get(rank, (0, now))
            lines, since = (lines + 1, since) if slow else (0, now)
            self.streaks[rank] = lines, since
            if lines >= LINES and now - since >= SECONDS and rank not in self.said:
                self.said.add(rank)
                node, several = self.world.nodes[rank], len(set(self.world.nodes)) > 1
                warning = (
                    f"rank {rank} on {self.world.hostnames[rank]} is slow: its forward pass takes "
                    f"{mean:.3g} s, the median of the ranks {median:.3g} s: see what else runs "
                    f"there{f', or submit with --exclude={node}' if several else ''}"
                )
                log.warning("%s", warning)
                training.logger.status.warnings.append(warning)
                if several:
                    note_bad_nodes([node])


def _now(device: str) -> float:
    """Return the time, on a GPU after it has finished its work."""
    if device != "cpu":
        import torch

        torch.get_device_module(device).synchronize()
    return time.perf_counter()
