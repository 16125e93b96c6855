"""The network, its optimizer, loss and metrics. This file is yours: replace it with your own."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .learner import Learner
from .settings import Settings


class Network(nn.Module):
    """A multilayer perceptron that predicts one column of a table from the others.

    `forward` takes rows, float, of shape (batch, columns), and returns predictions (batch,).
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.scale = settings.target_scale
        # Normalizes each column to mean 0 and standard deviation 1.
        layers: list[nn.Module] = [nn.BatchNorm1d(len(settings.columns), affine=False)]
        features = len(settings.columns)
        for _ in range(settings.layers):
            layers += [nn.Linear(features, settings.width), nn.GELU(), nn.Dropout(settings.dropout)]
            features = settings.width
        self.layers = nn.Sequential(*layers, nn.Linear(features, 1))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows).squeeze(1).float() * self.scale


Batch = tuple[Tensor, Tensor]  # rows (batch, columns), targets (batch,)


class Model(Learner):
    """A regression model. learner.py describes these methods and all that you can override."""

    best = ("validation/loss", "min")
    unit = "rows"

    def build(self) -> nn.Module:
        return Network(self.settings)

    def optimizers(self, network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            network.parameters(), lr=self.settings.lr, weight_decay=self.settings.weight_decay
        )

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        rows, targets = batch
        scale = self.settings.target_scale
        return F.mse_loss(network(rows) / scale, targets / scale)

    def measure(self, network: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        rows, targets = batch
        # Sums of squares need float64 to be exact enough, and some devices do not support it.
        targets = targets.cpu().double()
        errors = network(rows).cpu().double() - targets
        return {
            "absolute_error": errors.abs().sum(),
            "squared_error": errors.square().sum(),
            "target": targets.sum(),
            "squared_target": targets.square().sum(),
        }

    def compute_metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        rows, squared_error = sums["weight"], sums["squared_error"]
        variance = sums["squared_target"] / rows - (sums["target"] / rows) ** 2
        return {
            "loss": squared_error / rows / self.settings.target_scale**2,
            "mae": sums["absolute_error"] / rows,
            "r2": 1 - squared_error / rows / variance,
        }

    def describe(self, prediction: Tensor) -> dict[str, float]:
        return {self.settings.target: float(prediction)}
