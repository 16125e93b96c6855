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
        "accuracy_by_class": accuracy_by_class(sums["right_of_class"], sums["of_class"]),
        "predictions": predictions(images, outputs, labels),
    }


def accuracy_by_class(right: Tensor, samples: Tensor) -> Figure:
    """Draw the accuracy of each class, from the worst to the best."""
    known = samples > 0
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="classes, the worst first", ylabel="accuracy", ylim=(0, 1.02))
    axes.step(range(int(known.sum())), (right[known] / samples[known]).sort().values, where="mid")
    axes.grid(alpha=0.3)
    return figure


def predictions(images: Tensor, outputs: Tensor, labels: Tensor) -> Figure:
    """Draw sixteen images with their predicted classes. Wrong predictions are red."""
    figure = Figure(figsize=(6, 6.5))
    axes = figure.add_axes((0, 0, 1, 1))
    samples = zip(images[:16], outputs.argmax(dim=1), labels, strict=False)
    for number, (image, predicted, true) in enumerate(samples):
        top, left = -1.2 * (number // 4), 1.2 * (number % 4)
        axes.imshow(image, extent=(left, left + 1, top - 1, top))
        right = predicted == true
        title = f"{predicted}" if right else f"{predicted}, is {true}"
        color = "black" if right else "red"
        axes.text(left + 0.5, top + 0.04, title, color=color, size=9, ha="center")
    axes.set(xlim=(-0.1, 4.7), ylim=(-4.7, 0.2))
    axes.set_axis_off()
    return figure
