"""Sums over all ranks before a step: was any rank asked to stop, and how many samples has it?

Samples say where the training is, weights how much batches count in the mean of the step.

The sums are computed while the step before is, and still cost a step of ten milliseconds a
twentieth of its time. So ranks that all have equally many samples sum on every tenth step alone,
as long as steps are short.
"""

import time

from .signals import StopRequest
from .world import Sum, World

SHORT_STEP = 0.1  # seconds of a step
SUM_INTERVAL = 10  # steps: also how many a signal may wait for, should they suddenly become long


class StepTotals:
    """The sums of the steps of one epoch.

    Every rank calls `begin` for the step after this one, takes this one, and then asks for the
    `result`. To ask again changes nothing.

    Args:
        world: the ranks.
        stop: whether this one was asked to stop.
        step: steps taken by now.
        uneven: whether ranks may have different samples or weights, so that each step needs them.
    """

    def __init__(self, world: World, stop: StopRequest, step: int, uneven: bool) -> None:
        self.world, self.stop = world, stop
        self.all_needed = uneven or world.size == 1  # alone, asking costs nothing
        self.until_sums = 0  # steps without sums that are still to come
        self.last_step, self.last_time = step, time.perf_counter()
        self.samples, self.weight = 0, 0
        self.sum: Sum | None = None

    def begin(self, step: int, samples: int, weight: int) -> None:
        """Start the sums of the next step, or let it pass without them.

        Args:
            step: steps taken by now.
            samples: of this rank in that step; 0 at the end of its epoch, where
                there always are sums. Other ranks have as many, unless they are uneven.
            weight: of these samples.
        """
        self.samples, self.weight, self.sum = samples, weight, None
        if self.until_sums and samples:
            self.until_sums -= 1
            return
        stop = self.stop.received is not None
        self.sum = self.world.start_sum([stop, samples, weight, self._steps_are_short(step)])

    def result(self) -> tuple[bool, int, int]:
        """Return whether any rank must stop before the step, and all ranks' samples and weight."""
        if self.sum is None:
            return False, self.samples * self.world.size, self.weight * self.world.size
        began = time.perf_counter()
        stops, samples, weight, short = self.sum.result()
        # Slow sums must not make steps look long, and so sums more frequent.
        self.last_time += time.perf_counter() - began
        # Decided by what all ranks know alike: one that went by its own clock would be alone.
        if short == self.world.size and not self.all_needed:
            self.until_sums = SUM_INTERVAL - 1
        return stops > 0, samples, weight

    def _steps_are_short(self, step: int) -> bool:
        """Return whether those since the last sums were, on this rank."""
        now = time.perf_counter()
        taken, seconds = step - self.last_step, now - self.last_time
        self.last_step, self.last_time = step, now
        return seconds < taken * SHORT_STEP
