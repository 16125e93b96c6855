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
    images, labels = batch
    return {
        "confusion_matrix": confusion_matrix(sums["confusion"]),
        "predictions": predictions(images, outputs, labels),
    }


def confusion_matrix(counts: Tensor) -> Figure:
    """Draw the confusion matrix. Each cell is shaded by its share of the samples of its row."""
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    figure = Figure(figsize=(6, 6))
    axes = figure.add_subplot(xlabel="predicted", ylabel="true")
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    classes = range(len(counts))
    axes.set_xticks(classes)
    axes.set_yticks(classes)
    for true in classes:
        for predicted in classes:
            if number := int(counts[true, predicted]):
                color = "white" if shares[true, predicted] > 0.5 else "black"
                axes.text(
                    predicted, true, str(number), ha="center", va="center", color=color, size=8
                )
    return figure


def predictions(inputs: Tensor, outputs: Tensor, targets: Tensor) -> Figure:
    """Draw sixteen samples with their predicted classes. Wrong predictions are red."""
    figure = Figure(figsize=(6, 6.5))
    axes = figure.add_axes((0, 0, 1, 1))
    samples = zip(inputs[:16], outputs.argmax(dim=1), targets, strict=False)
    for number, (image, predicted, true) in enumerate(samples):
        top, left = -1.2 * (number // 4), 1.2 * (number % 4)
        axes.imshow(image[0], cmap="gray", extent=(left, left + 1, top - 1, top))
        right = predicted == true
        title = f"{predicted}" if right else f"{predicted}, is {true}"
        color = "black" if right else "red"
        axes.text(left + 0.5, top + 0.04, title, color=color, size=9, ha="center")
    axes.set(xlim=(-0.1, 4.7), ylim=(-4.7, 0.2))
    axes.set_axis_off()
    return figure
