"""Sums over all ranks before a step: stop requests, samples and weights.

They are computed during the step before, but still cost 8 % of a step of 7 ms. So ranks that all
have the same number of samples compute them only every tenth step, while steps are short.
"""

import time

import torch
import torch.distributed as dist

from .signals import StopRequest
from .world import World

SHORT_STEP = 0.1  # seconds
SUM_INTERVAL = 10  # steps; a signal may wait for as many


class StepTotals:
    """The sums of the next step.

    Every rank calls `begin` for the next step, takes the current step, and then calls `result`.

    Args:
        step: steps taken so far.
        uneven: whether ranks may have different samples or weights; if so, each step is summed.
    """

    def __init__(self, world: World, stop: StopRequest, step: int, uneven: bool) -> None:
        self.world, self.stop = world, stop
        self.all_needed = uneven or world.size == 1  # a single rank sums at no cost
        self.until_sums = 0  # remaining steps without sums
        self.last_step, self.last_time = step, time.perf_counter()  # at the last sums
        self.work: dist.Work | None = None

    def begin(self, step: int, samples: int, weight: int) -> None:
        """Start to sum this rank's samples of the next step and their weight.

        Args:
            step: steps taken so far.
            samples: 0 at the end of the epoch, which is always summed.
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
        """Return whether any rank must stop before the step, and the samples and weight of all."""
        if self.work:
            began = time.perf_counter()
            self.work.wait()
            self.work = None
            # The wait for the sums does not count as time of the step.
            self.last_time += time.perf_counter() - began
        stops, samples, weight, short = self.sums.tolist()
        # All ranks decide by the same sum: the clocks of single ranks differ.
        if self.summed and short == self.world.size and not self.all_needed:
            self.until_sums = SUM_INTERVAL - 1
        return stops > 0, samples, weight
