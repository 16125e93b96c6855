"""Finds ranks that are slower than the others for a long time, by the time of forward passes.

In the backward pass of DDP, all ranks wait for the slowest one, so only forward passes differ. With
FSDP, ranks also wait for each other in the forward pass, so a slow rank can't be found.
"""

import logging
import time
from collections.abc import Sequence
from statistics import median_low

from ..errors import note_bad_nodes
from ..ranks.world import World
from .record import LOSS, Values

log = logging.getLogger(__name__)

FORWARD = "system/forward_seconds"
LIMIT = 1.15  # a slow rank takes more than this many times the median of all ranks,
LINES, SECONDS = 10, 60.0  # at this many log lines in a row, and for this many seconds


class SlowRanks:
    """Compares the ranks at each log line, on rank 0.

    Attributes:
        said: the warning about each slow rank, by rank.
    """

    def __init__(self) -> None:
        self.said: dict[int, str] = {}
        self.streaks: dict[int, tuple[int, float]] = {}

    def compare(self, ranks: Sequence[Values], world: World) -> None:
        """Compare the numbers that the ranks have recorded since the last log line."""
        if not world.is_main or not all(FORWARD in each for each in ranks):
            return
        means = [each[FORWARD][1] / each[FORWARD][2] for each in ranks]
        weights = [sum(w for n, (_, _, w) in each.items() if LOSS.fullmatch(n)) for each in ranks]
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
                node, several = world.nodes[rank], len(set(world.nodes)) > 1
                self.said[rank] = (
                    f"rank {rank} on {world.hostnames[rank]} is slow: its forward pass takes "
                    f"{mean:.3g} s, the median of the ranks {median:.3g} s: see what else runs "
                    f"there{f', or submit with --exclude={node}' if several else ''}"
                )
                log.warning("%s", self.said[rank])
                if several:
                    note_bad_nodes([node])
