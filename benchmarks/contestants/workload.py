"""The project's network, optimizer, loss and data, which all contestants use."""

import os
from pathlib import Path

import torch
from demo import mnist, model
from demo.data import Digits
from demo.settings import Settings
from torch import Tensor, nn

SETTINGS = Settings()
LEARNER = model.Model(SETTINGS)


def digits() -> tuple[Tensor, Tensor]:
    """Return images, uint8 of shape (samples, 28, 28), and labels, int64 of shape (samples,)."""
    folder = os.environ["BENCHMARK_DATA"]
    return mnist.read(Path(folder), "train") if folder else mnist.synthesize(20_000, seed=1)


def images() -> tuple[Tensor, Tensor]:
    """Return all images as network inputs (samples, 1, 28, 28), and labels (samples,)."""
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
    """Clip the norm of the gradient to the project's limit."""
    nn.utils.clip_grad_norm_(of.parameters(), SETTINGS.clip_norm)


def loss(of: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the project's loss of a batch."""
    return LEARNER.loss(of, (inputs, targets))
