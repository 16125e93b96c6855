"""Sums over all ranks before each step: stop requests, samples and weights.

The sums are computed during the previous step, but still cost 8 % of the time of a step of 7 ms.
So if steps are short and all ranks have the same number of samples, the sums are computed only
every tenth step.
"""

import time

import torch
import torch.distributed as dist

from .signals import StopRequest
from .world import World

SHORT_STEP = 0.1  # seconds
SUM_INTERVAL = 10  # steps; a stop request may wait as many steps


class StepTotals:
    """Computes the sums of the next step while the current step runs.

    Every rank calls `begin` for the next step, takes the current step, and then calls `result`.

    Args:
        step: steps taken so far.
        uneven: whether ranks may have different numbers of samples or different weights in a step;
            then the sums are computed at each step.
    """

    def __init__(self, world: World, stop: StopRequest, step: int, uneven: bool) -> None:
        self.world, self.stop = world, stop
        self.all_needed = uneven or world.size == 1  # for a single rank, sums cost nothing
        self.until_sums = 0  # steps left before the next sums
        self.last_step, self.last_time = step, time.perf_counter()  # at the last sums
        self.work: dist.Work | None = None

    def begin(self, step: int, samples: int, weight: int) -> None:
        """Start to sum the numbers of the next step over all ranks.

        Args:
            step: steps taken so far.
            samples: the number of this rank's samples in the next step; 0 at the end of the epoch,
                when the sums are always computed.
            weight: the weight of these samples in means.
        """
        self.summed = not self.until_sums or samples == 0
        if not self.summed:
            self.until_sums -= 1
            self.sums = torch.tensor([0, samples, weight, 0]) * self.world.size
            return
        now = time.perf_counter()
        short = now - self.last_time < (step - self.last_step) * SHORT_STEP
        self.last_step, self.last_time = step, now
        self.sums = torch.tensor([self.stop.received is not None, samples, weight, short])
        if self.world.size > 1:
            self.work = dist.all_reduce(self.sums, group=self.world.control, async_op=True)

    def result(self) -> tuple[bool, int, int]:
        """Return whether to stop before the step, and its samples and weight over all ranks."""
        if self.work:
            began = time.perf_counter()
            self.work.wait()
            self.work = None
            # The time of the wait for the sums does not count as part of the step.
            self.last_time += time.perf_counter() - began
        stops, samples, weight, short = self.sums.tolist()
        # All ranks decide by the same sum, since their own measurements of time differ.
        if self.summed and short == self.world.size and not self.all_needed:
            self.until_sums = SUM_INTERVAL - 1
        return stops > 0, samples, weight
