"""Figures of the predictions for the test set. This file is yours."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from torch import Tensor


def draw(
    sums: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], outputs: Tensor
) -> dict[str, Figure]:
    """Return the figures, by name; {} for none.

    Args:
        sums: what `measure` of model.py returned, summed over the test set.
        batch, outputs: rank 0's first batch, and what `predict` of model.py returned for it.
    """
    return {"predictions": predictions(outputs, batch[1])}


def predictions(outputs: Tensor, targets: Tensor) -> Figure:
    """Draw predicted over true values; on the line they are equal."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="true", ylabel="predicted")
    axes.axline((float(targets.mean()),) * 2, slope=1, color="gray", linewidth=1)
    axes.scatter(targets, outputs.float(), s=6, alpha=0.5)
    return figure
