"""What ranks ask each other before a step: must anybody stop, and how many samples has it?

The answer travels while the step before is computed, and still costs a step of ten milliseconds a
twentieth of its time. Ranks that all have equally many samples need not ask before each step: they
do so about ten times a second.
"""

import time

from .distributed import Sum, World
from .preemption import StopRequest

SECONDS = 0.1  # between two votes
STEPS = 10  # at most, in case that steps suddenly take long


class Votes:
    """The votes before the steps of one epoch.

    Every rank calls `begin` before a step, and `result` when it needs the outcome.

    Args:
        world: the ranks.
        stop: whether this one was asked to stop.
        uneven: whether ranks may have different numbers of samples, so that each step needs asking.
    """

    def __init__(self, world: World, stop: StopRequest, uneven: bool) -> None:
        self.world, self.stop, self.uneven = world, stop, uneven
        self.asked_at, self.since, self.unasked = 0, time.perf_counter(), 0
        self.samples = 0
        self.sum: Sum | None = None

    def begin(self, step: int, samples: int) -> None:
        """Start to vote on a step, or let it pass unasked.

        Args:
            step: steps taken by now.
            samples: of this rank in the step that the vote is on; 0 at the end of its epoch, where
                ranks always ask. Other ranks have as many, unless they are uneven.
        """
        self.samples, self.sum = samples, None
        if self.unasked and samples:
            self.unasked -= 1
            return
        stop = self.stop.received is not None
        self.sum = self.world.start_sum([stop, samples, self._pause(step)])

    def result(self) -> tuple[bool, int]:
        """Return whether any rank must stop before the step, and the samples of all ranks in it."""
        if self.sum is None:
            return False, self.samples * self.world.size
        began = time.perf_counter()
        stops, samples, pauses = self.sum.result()
        self.since += time.perf_counter() - began
        if not self.uneven:
            self.unasked = max(pauses // self.world.size - 1, 0)
        return stops > 0, samples

    def _pause(self, step: int) -> int:
        """Return after how many steps this rank would vote again, by how long the last ones took.

        Waiting for a vote is left out: it would make ranks that wait long vote more often.
        """
        now = time.perf_counter()
        taken, seconds = step - self.asked_at, now - self.since
        self.asked_at, self.since = step, now
        return int(min(taken * SECONDS / max(seconds, 1e-9), STEPS))
