"""The network, its optimizer, loss and metrics. This file is yours: replace it with your own."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .learner import Learner
from .settings import Settings


class Block(nn.Module):
    """A residual block: two convolutions and a shortcut (He et al. 2016).

    `forward` takes features of shape (batch, inputs, height, width) and returns features of shape
    (batch, outputs, height / stride, width / stride), rounded up.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *convolution(inputs, outputs, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(outputs, outputs, 3),
        )
        # Average pooling instead of a strided 1 by 1 convolution: with stride 2, that ignores
        # three of four values (He et al. 2019). With few channels, PyTorch 2.13 crashes in it on
        # a CPU.
        shortcut: list[nn.Module] = [nn.AvgPool2d(stride, ceil_mode=True)] if stride > 1 else []
        shortcut += convolution(inputs, outputs, 1) if inputs != outputs else []
        self.shortcut = nn.Sequential(*shortcut)

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.layers(features) + self.shortcut(features))


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution and a batch norm."""
    padding = kernel // 2
    return [
        nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class ResNet(nn.Module):
    """A residual network (He et al. 2016).

    With width 64, layers (2, 2, 2, 2) make ResNet-18, and (3, 4, 6, 3) make ResNet-34. `forward`
    takes images, uint8, of shape (batch, size, size, 3), and returns logits (batch, classes).
    Images are uint8 because they are then four times smaller to copy to the GPU than as float32.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            *convolution(3, settings.width, 7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        blocks: list[nn.Module] = []
        inputs = settings.width
        for stage, count in enumerate(settings.layers):
            outputs = settings.width * 2**stage
            for number in range(count):
                blocks.append(Block(inputs, outputs, stride=2 if stage and not number else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, settings.classes)
        # On CPUs and GPUs, convolutions are fastest with the memory format channels_last.
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2).float().div(127.5).sub(1)
        return self.head(self.blocks(self.stem(pixels)).mean(dim=(2, 3)))


Batch = tuple[Tensor, Tensor]  # images, uint8 (batch, size, size, 3), and classes (batch,)


class Model(Learner):
    """The model for images. learner.py describes these methods and all that you can override."""

    best = ("validation/accuracy", "max")

    def build(self) -> nn.Module:
        return ResNet(self.settings)

    def optimizers(self, network: nn.Module) -> torch.optim.Optimizer:
        settings = self.settings
        groups: list[dict[str, Any]] = [
            {"params": [each for each in network.parameters() if each.dim() > 1]},
            {"params": [each for each in network.parameters() if each.dim() == 1]},
        ]
        groups[1]["weight_decay"] = 0.0  # for biases and batch norms
        return torch.optim.SGD(
            groups,
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.momentum > 0,
            weight_decay=settings.weight_decay,
        )

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(
            network(images), labels, label_smoothing=self.settings.label_smoothing
        )

    def measure(self, network: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        images, labels = batch
        logits = network(images).float()
        classes = logits.shape[1]
        best = logits.topk(min(5, classes)).indices
        right = best == labels.unsqueeze(1)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": right[:, 0].sum(),
            "accuracy_top5": right.sum(),
            "of_class": torch.bincount(labels, minlength=classes),
            "right_of_class": torch.bincount(labels[right[:, 0]], minlength=classes),
        }

    def predict(self, network: nn.Module, batch: Batch) -> Tensor:
        return network(batch[0])

    def describe(self, logits: Tensor) -> dict[str, float]:
        return {"class": int(logits.argmax()), "probability": float(logits.softmax(0).max())}
