"""What all contestants share: the project's network, optimizer, loss and data, and the clock."""

import json
import os
import time
from pathlib import Path

import torch
from demo import mnist, model
from demo.data import Digits
from demo.settings import Settings
from torch import Tensor, nn

SETTINGS = Settings()
LEARNER = model.Model(SETTINGS)


def batch_size() -> int:
    """Return the samples that a rank takes at once."""
    return int(os.environ["BENCHMARK_BATCH"])


def device() -> torch.device:
    """Return this rank's device, chosen for CUDA."""
    if os.environ["BENCHMARK_DEVICE"] == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def digits() -> tuple[Tensor, Tensor]:
    """Return images, uint8 of shape (samples, 28, 28), and labels, int64 of shape (samples,)."""
    folder = os.environ["BENCHMARK_DATA"]
    return mnist.read(Path(folder), "train") if folder else mnist.synthesize(20_000, seed=1)


def images() -> tuple[Tensor, Tensor]:
    """Return all images as the network takes them, (samples, 1, 28, 28), and labels (samples,)."""
    pixels, labels = digits()
    return (pixels.unsqueeze(1).float() - Digits.MEAN) / Digits.DEVIATION, labels


def network() -> nn.Module:
    """Return the project's network."""
    torch.manual_seed(0)
    return LEARNER.build()


def optimizer(of: nn.Module) -> torch.optim.Optimizer:
    """Return the project's optimizer."""
    return LEARNER.optimizers(of)


def clip(of: nn.Module) -> None:
    """Scale the gradient down to the project's limit."""
    nn.utils.clip_grad_norm_(of.parameters(), SETTINGS.clip_norm)


def loss(of: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the project's loss of a batch."""
    return LEARNER.loss(of, (inputs, targets))


class Clock:
    """Times the steps behind the warm-up, and prints images per second of all ranks.

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
