"""Converts pictures, histograms and tables for files and trackers."""

import csv
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pixels(image: "Figure | Tensor") -> np.ndarray:
    """Return a picture as a uint8 array of shape (height, width, 3).

    Args:
        image: a matplotlib figure, or a tensor of shape (height, width), (1, height, width) or
            (3, height, width): uint8 from 0 to 255, or float from 0 to 1.

    Raises:
        ValueError: the tensor has another shape.
    """
    if not isinstance(image, Tensor):
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(image)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()
    array = image.detach().cpu()
    if array.is_floating_point():
        array = (array.float().nan_to_num().clamp(0, 1) * 255).round()
    array = array if array.ndim == 3 else array[None]
    if array.ndim != 3 or len(array) not in (1, 3):
        raise ValueError(
            f"a picture has shape {tuple(image.shape)}: it must be (height, width), or "
            "(3, height, width) in colour"
        )
    return array.expand(3, -1, -1).movedim(0, -1).byte().contiguous().numpy()


def binned(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a histogram of the finite values: the counts in 64 bins, and the 65 edges.

    NumPy raises an error if the range is too narrow for bins, or overflows. So the range is widened
    if all values are equal except for rounding, and values near the largest float are clipped.
    """
    limit = np.finfo(float).max / 4
    finite = values[np.isfinite(values)].astype(float).clip(-limit, limit)
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    size = max(abs(low), abs(high))
    if high - low <= max(1e-12 * size, 1e-300):
        margin = max(0.5, 1e-9 * size)
        low, high = low - margin, high + margin
    return np.histogram(finite, bins=64, range=(low, high))


def as_csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as CSV text, with the names of the columns in the first line."""
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue()
