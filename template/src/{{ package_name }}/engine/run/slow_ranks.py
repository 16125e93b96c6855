"""Finds ranks that compute more slowly than the others, for long, by their forward passes.

In the backward pass of DDP, each rank waits for the slowest one. With FSDP, ranks wait in the
forward pass too, so none stands out.
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
LIMIT = 1.15  # times the median of the ranks
LINES, SECONDS = 10, 60.0  # at so many log lines in a row, and for so long


class SlowRanks:
    """Compares the ranks at each log line, on rank 0.

    Attributes:
        said: by rank, what was logged about it.
    """

    def __init__(self) -> None:
        self.said: dict[int, str] = {}
        self.streaks: dict[int, tuple[int, float]] = {}

    def compare(self, ranks: Sequence[Values], world: World) -> None:
        """Compare what the ranks have recorded since the last log line."""
        if not world.is_main or not all(FORWARD in each for each in ranks):
            return
        means = [each[FORWARD][1] / each[FORWARD][2] for each in ranks]
        weights = [sum(w for n, (_, _, w) in each.items() if LOSS.fullmatch(n)) for each in ranks]
        by_weight = [mean / max(weight, 1e-9) for mean, weight in zip(means, weights, strict=True)]
        # If half of the ranks are slow, these are of a fast one.
        median, median_by_weight, now = median_low(means), median_low(by_weight), time.monotonic()
        for rank, mean in enumerate(means):
            # By both: a rank with longer texts needs longer, one with shorter texts more for each.
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
