"""Figures drawn from the predictions for the test set. This file is yours."""

from collections.abc import Mapping

from matplotlib.figure import Figure
from torch import Tensor


def draw(
    sums: Mapping[str, Tensor], batch: tuple[Tensor, Tensor], outputs: Mapping[str, Tensor]
) -> dict[str, Figure]:
    """Return the figures by name, or {} if there are none.

    Args:
        sums: the results of `measure` in model.py, summed over the test set.
        batch: rank 0's first batch of the test set.
        outputs: the result of `predict` in model.py for this batch.
    """
    return {"loss_at_position": loss_at_position(sums["loss_at_position"], sums["weight"])}


def loss_at_position(losses: Tensor, tokens: Tensor) -> Figure:
    """Draw the mean loss against the number of tokens that the network saw before."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens seen", ylabel="loss")
    axes.plot(range(1, len(losses) + 1), losses * len(losses) / tokens)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    return figure
