"""How long a checkpoint delays the training loop, with the example or with a larger network.

Records the median milliseconds of a step, and of a save without the first, which allocates memory.
"""

import json
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from demo import model, train
from demo.engine import training
from demo.engine.epochs import Step
from demo.engine.ranks.signals import StopRequest
from demo.engine.training import Training
from demo.settings import Settings
from torch import Tensor, nn

AT_ONCE = bool(os.environ["BENCHMARK_AT_ONCE"])  # or during the training, in a thread
SYNCED = bool(os.environ["BENCHMARK_SYNCED"])  # whether to call fsync
MEGABYTES = int(os.environ["BENCHMARK_MEGABYTES"])  # size of the parameters; 0: the example


class Large(nn.Module):
    """Linear layers for the digits, with parameters of MEGABYTES."""

    def __init__(self) -> None:
        super().__init__()
        width = int((MEGABYTES * 2**20 / 4 / 6) ** 0.5)
        self.inlet, self.outlet = nn.Linear(784, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.inlet(images.flatten(1))
        for block in self.blocks:
            hidden = hidden + torch.relu(block(hidden))
        return self.outlet(hidden)


class Timed(Training):
    """A training that measures the time of its steps and saves."""

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments)
        self.steps: list[float] = []
        self.saves: list[float] = []

    def prepare(self, step: Step) -> None:
        self.steps.append(time.perf_counter())
        super().prepare(step)

    def save(self, best: bool = False) -> None:
        began = time.perf_counter()
        super().save(best)
        if AT_ONCE:
            self.checkpointing.wait()
        self.saves.append(time.perf_counter() - began)

    def write_summary(self, test: dict[str, float]) -> None:
        steps = [after - before for before, after in pairwise(self.steps)]
        if self.world.is_main:
            path = Path(os.environ["BENCHMARK_RESULT"])
            seconds = {"step": steps, "save": self.saves[1:]}
            figures = {what: 1000 * statistics.median(each) for what, each in seconds.items()}
            path.write_text(json.dumps(figures))
        super().write_summary(test)


if MEGABYTES:
    model.Model.build = lambda _: Large()
if not SYNCED:
    os.fsync = lambda _: None
training.Training = Timed
sys.exit(train.run(Settings.parse(sys.argv[1:]), StopRequest.install()))
