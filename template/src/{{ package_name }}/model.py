"""The network, its optimizer, its loss and its score. This file is yours: put in your own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Settings


class Network(nn.Module):
    """A small convolutional network for digits: 28 by 28 grey pixels in, ten logits out.

    Args of `forward`: images, float, of shape (batch, 1, 28, 28). Returns (batch, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.PixelUnshuffle(2),  # (4, 14, 14): the same pixels, a quarter of the positions
            convolution(4, 24),
            nn.MaxPool2d(2),  # (24, 7, 7)
            convolution(24, 48),
            convolution(48, 64),
            nn.MaxPool2d(3, stride=2),  # (64, 3, 3)
            nn.Flatten(),
            nn.Linear(64 * 3 * 3, 10),
        )
        # Channels last is the layout that convolutions are fastest in, on CPU and GPU.
        self.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images.contiguous(memory_format=torch.channels_last))


def convolution(inputs: int, outputs: int) -> nn.Module:
    """Return a 3 by 3 convolution that keeps height and width, normalised and rectified."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def build() -> nn.Module:
    """Return the network to train."""
    return Network()


def build_optimizer(network: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Return the optimizer; schedule.py sets the learning rate of all its groups at each step."""
    return torch.optim.SGD(
        network.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        nesterov=settings.momentum > 0,
        weight_decay=settings.weight_decay,
    )


def loss(outputs: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean loss of a batch, a scalar.

    It has no parameters of its own; a loss that has some belongs inside the network, where their
    gradients are shared between ranks.
    """
    return F.cross_entropy(outputs, targets, label_smoothing=label_smoothing)


def count_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return how many samples of a batch are right, a scalar."""
    return (outputs.argmax(dim=1) == targets).sum()
