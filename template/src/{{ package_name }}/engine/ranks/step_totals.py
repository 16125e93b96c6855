"""Sums over all ranks before a step: stop requests, samples and weights.

They are computed during the step before, but still cost 5 % of a step of 10 ms. So ranks that all
have the same number of samples compute them only every tenth step, while steps are short.
"""

import time
from collections.abc import Callable

from .signals import StopRequest
from .world import World

SHORT_STEP = 0.1  # seconds
SUM_INTERVAL = 10  # steps; a signal may wait for as many


class StepTotals:
    """The sums of the steps of one epoch.

    Every rank calls `begin` for the next step, takes the current step, and then calls `result`.

    Args:
        world: the ranks.
        stop: whether this rank was asked to stop.
        step: steps taken so far.
        uneven: whether ranks may have different samples or weights; if so, each step is summed.
    """

    def __init__(self, world: World, stop: StopRequest, step: int, uneven: bool) -> None:
        self.world, self.stop = world, stop
        self.all_needed = uneven or world.size == 1  # a single rank sums at no cost
        self.until_sums = 0  # remaining steps without sums
        self.last_step, self.last_time = step, time.perf_counter()
        self.samples, self.weight = 0, 0
        self.sum: Callable[[], list[int]] | None = None

    def begin(self, step: int, samples: int, weight: int) -> None:
        """Start the sums of the next step, if it needs them.

        Args:
            step: steps taken so far.
            samples: of this rank in the next step; 0 at the end of the epoch, which is always
                summed.
            weight: of these samples.
        """
        self.samples, self.weight, self.sum = samples, weight, None
        if self.until_sums and samples:
            self.until_sums -= 1
            return
        stop = self.stop.received is not None
        self.sum = self.world.start_sum([stop, samples, weight, self._steps_are_short(step)])

    def result(self) -> tuple[bool, int, int]:
        """Return whether any rank must stop before the step, and the samples and weight of all."""
        if self.sum is None:
            return False, self.samples * self.world.size, self.weight * self.world.size
        began = time.perf_counter()
        stops, samples, weight, short = self.sum()
        # The wait for the sums does not count as time of the step.
        self.last_time += time.perf_counter() - began
        # All ranks decide by the same sum: the clocks of single ranks differ.
        if short == self.world.size and not self.all_needed:
            self.until_sums = SUM_INTERVAL - 1
        return stops > 0, samples, weight

    def _steps_are_short(self, step: int) -> bool:
        """Return whether the steps of this rank since the last sums were short."""
        now = time.perf_counter()
        taken, seconds = step - self.last_step, now - self.last_time
        self.last_step, self.last_time = step, now
        return seconds < taken * SHORT_STEP
