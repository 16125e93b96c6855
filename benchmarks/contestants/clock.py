"""How a contestant gets its settings, and how it prints its figure."""

import json
import os
import time

import torch
from stopwatch import peak_mib


def batch_size() -> int:
    """Return the batch size of each rank."""
    return int(os.environ["BENCHMARK_BATCH"])


def device() -> torch.device:
    """Return this rank's device, and make it the current CUDA device."""
    if os.environ["BENCHMARK_DEVICE"] == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


class Clock:
    """Times the steps after the warm-up, and prints images per second of all ranks.

    It also prints what rank 0 needs: `cpu ms`, the CPU time of a step, user and system, over all
    its threads, and `rank MiB`, the peak memory of its process.

    Attributes:
        total: number of steps to take, including the warm-up.
    """

    def __init__(self) -> None:
        self.warm_up = int(os.environ["BENCHMARK_WARM_UP"])
        self.total = self.warm_up + int(os.environ["BENCHMARK_STEPS"])
        self.steps = 0

    def step(self) -> bool:
        """Count a step; return whether it was the last one."""
        self.steps += 1
        if self.steps in (self.warm_up, self.total):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now, cpu = time.perf_counter(), time.process_time()
            if self.steps == self.warm_up:
                self.began, self.cpu = now, cpu
            elif int(os.environ["RANK"]) == 0:
                steps = self.total - self.warm_up
                samples = steps * batch_size() * int(os.environ["WORLD_SIZE"])
                found = {"figure": samples / (now - self.began), "rank MiB": peak_mib()}
                print(json.dumps(found | {"cpu ms": 1000 * (cpu - self.cpu) / steps}), flush=True)
        return self.steps >= self.total
