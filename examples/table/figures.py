"""Figures drawn from the predictions for the test set. This file is yours."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from torch import Tensor


def draw(
    sums: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], outputs: Tensor
) -> dict[str, Figure]:
    """Return the figures by name, or {} if there are none.

    Args:
        sums: the results of `measure` in model.py, summed over the test set.
        batch: rank 0's first batch of the test set.
        outputs: the result of `predict` in model.py for this batch.
    """
    return {"predictions": predictions(outputs, batch[1])}


def predictions(outputs: Tensor, targets: Tensor) -> Figure:
    """Draw predicted against true values. On the line, the two are equal."""
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot(xlabel="true", ylabel="predicted")
    axes.axline((float(targets.mean()),) * 2, slope=1, color="gray", linewidth=1)
    axes.scatter(targets, outputs.float(), s=6, alpha=0.5)
    return figure
