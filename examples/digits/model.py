"""The network, its optimizer, loss and metrics. This file is yours: replace it with your own."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .learner import Learner


class Network(nn.Module):
    """A small convolutional network that classifies digits.

    `forward` takes images, float, of shape (batch, 1, 28, 28), and returns logits (batch, 10).
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.PixelUnshuffle(2),  # (4, 14, 14): all pixels, at a quarter of the positions
            convolution(4, 24, pool=nn.MaxPool2d(2)),  # (24, 7, 7)
            convolution(24, 48, pool=nn.MaxPool2d(3, stride=2)),  # (48, 3, 3)
            convolution(48, 64),  # (64, 3, 3)
            nn.Flatten(),
            nn.Linear(64 * 3 * 3, 10),
        )
        # On CPUs and GPUs, convolutions are fastest with the memory format channels_last.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images.contiguous(memory_format=torch.channels_last))


def convolution(inputs: int, outputs: int, pool: nn.Module | None = None) -> nn.Module:
    """Return a 3 by 3 convolution that keeps height and width, then pooling, batch norm and ReLU.

    Pooling comes before batch norm and ReLU, so that these have less to compute.
    """
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        pool or nn.Identity(),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


Batch = tuple[Tensor, Tensor]  # images (batch, 1, 28, 28), labels (batch,)


class Model(Learner):
    """The model for digits. learner.py describes these methods and all that you can override."""

    best = ("validation/accuracy", "max")

    def build(self) -> nn.Module:
        return Network()

    def optimizers(self, network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            network.parameters(),
            lr=self.settings.lr,
            momentum=self.settings.momentum,
            nesterov=self.settings.momentum > 0,
            weight_decay=self.settings.weight_decay,
        )

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(
            network(images), labels, label_smoothing=self.settings.label_smoothing
        )

    def measure(self, network: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        images, labels = batch
        outputs = network(images).float()
        pairs = labels * 10 + outputs.argmax(dim=1)
        return {
            "loss": F.cross_entropy(outputs, labels, reduction="sum"),
            "accuracy": (outputs.argmax(dim=1) == labels).sum(),
            "confusion": torch.bincount(pairs, minlength=100).reshape(10, 10),
        }

    def describe(self, outputs: Tensor) -> dict[str, float]:
        return {"digit": int(outputs.argmax()), "probability": float(outputs.softmax(0).max())}
