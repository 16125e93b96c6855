"""Pictures of what the network makes of the test set, for the trackers. This file is yours too."""

import torch
from matplotlib.figure import Figure
from torch import Tensor


def count(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return what is summed over all batches and ranks, for `draw`.

    Args:
        outputs, targets: of a batch, (batch, classes) and (batch,).

    Returns:
        How often each class was taken for each: (classes, classes), the true class first.
    """
    classes = outputs.shape[1]
    pairs = targets * classes + outputs.argmax(dim=1)
    return torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def draw(counts: Tensor, inputs: Tensor, outputs: Tensor, targets: Tensor) -> dict[str, Figure]:
    """Return the pictures, by name.

    Args:
        counts: the sum of what `count` returned.
        inputs, outputs, targets: of rank 0's first batch, on the CPU.
    """
    return {
        "confusion_matrix": confusion_matrix(counts),
        "predictions": predictions(inputs, outputs, targets),
    }


def confusion_matrix(counts: Tensor) -> Figure:
    """Draw how often each class was taken for each; shades are shares of the true class."""
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = figure.add_subplot(xlabel="predicted", ylabel="true")
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    classes = range(len(counts))
    axes.set_xticks(classes)
    axes.set_yticks(classes)
    for true in classes:
        for predicted in classes:
            if number := int(counts[true, predicted]):
                color = "white" if shares[true, predicted] > 0.5 else "black"
                axes.text(predicted, true, number, ha="center", va="center", color=color, size=8)
    return figure


def predictions(inputs: Tensor, outputs: Tensor, targets: Tensor) -> Figure:
    """Draw sixteen samples with what they were taken for; a mistake is named in red."""
    figure = Figure(figsize=(6, 6.5), layout="constrained")
    samples = zip(inputs[:16], outputs.argmax(dim=1), targets, strict=False)
    for number, (image, predicted, true) in enumerate(samples, 1):
        axes = figure.add_subplot(4, 4, number)
        axes.imshow(image[0], cmap="gray")
        axes.set_axis_off()
        right = predicted == true
        title = f"{predicted}" if right else f"{predicted}, is {true}"
        axes.set_title(title, color="black" if right else "red", size=9)
    return figure
