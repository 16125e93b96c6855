"""What a contestant is told, and how it tells its figure."""

import json
import os
import time

import torch


def batch_size() -> int:
    """Return the samples that a rank takes at once."""
    return int(os.environ["BENCHMARK_BATCH"])


def device() -> torch.device:
    """Return this rank's device, chosen for CUDA."""
    if os.environ["BENCHMARK_DEVICE"] == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


class Clock:
    """Times the steps after the warm-up, and prints images per second of all ranks.

    Attributes:
        total: steps to take, those of the warm-up among them.
    """

    def __init__(self) -> None:
        self.warm_up = int(os.environ["BENCHMARK_WARM_UP"])
        self.total = self.warm_up + int(os.environ["BENCHMARK_STEPS"])
        self.steps = 0

    def step(self) -> bool:
        """Count a step; return whether it was the last."""
        self.steps += 1
        if self.steps in (self.warm_up, self.total):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if self.steps == self.warm_up:
                self.began = time.perf_counter()
            elif int(os.environ["RANK"]) == 0:
                steps = self.total - self.warm_up
                samples = steps * batch_size() * int(os.environ["WORLD_SIZE"])
                figure = samples / (time.perf_counter() - self.began)
                print(json.dumps({"figure": figure}), flush=True)
        return self.steps >= self.total
