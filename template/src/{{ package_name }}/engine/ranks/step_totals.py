"""Sums over all ranks before a step: stop requests, samples and weights.

They are computed during the step before.
"""

import torch
import torch.distributed as dist

from .signals import StopRequest
from .world import World


class StepTotals:
    """The sums of the next step.

    Every rank calls `begin` for the next step, takes the current step, and then calls `result`.
    """

    def __init__(self, world: World, stop: StopRequest) -> None:
        self.world, self.stop = world, stop
        self.work: dist.Work | None = None

    def begin(self, samples: int, weight: int) -> None:
        """Start to sum this rank's samples of the next step (0 after the last one) and weight."""
        self.sums = torch.tensor([self.stop.received is not None, samples, weight])
        if self.world.size > 1:
            self.work = dist.all_reduce(self.sums, group=self.world.control, async_op=True)

    def result(self) -> tuple[bool, int, int]:
        """Return whether any rank must stop before the step, and the samples and weight of all."""
        if self.work:
            self.work.wait()
            self.work = None
        stops, samples, weight = self.sums.tolist()
        return stops > 0, samples, weight
