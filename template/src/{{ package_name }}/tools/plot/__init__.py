"""Draws the metrics of runs to a picture, without a server, a display or torch.

    python -m <package> plot RUN_DIR... [--metrics train/loss validation/accuracy] [--x time]

curves.py reads the metrics.
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure  # not pyplot: it looks for a display and keeps figures
from matplotlib.lines import Line2D

from ...engine.config import read_flags
from ...engine.errors import UsageError
from .. import program
from ..runs import is_number
from .curves import Curves, X, labels, load, positions

# Metrics that are drawn only if --metrics names them.
LEFT_OUT = ("system/", "test/", "train/data_seconds", "train/gradient_norm")
STYLES = ("-", "--", ":")  # of the metrics of a panel
NOT_METRICS = ("step", "time", "epoch")
FEW_VALUES = 20  # a curve of so many or fewer is drawn with dots, and not smoothed


@dataclasses.dataclass(frozen=True)
class Flags:
    """Draw curves of runs to a picture."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR...")]
    """folders of runs, or of experiments for all their runs"""
    metrics: tuple[str, ...] = ()
    """metrics to draw, a panel each; else all, with training and validation in one panel"""
    x: X = "step"
    """the x axis; time counts from a run's first line and includes waits in the queue"""
    smooth: float = 0.0
    """weight of the past in a moving average, from 0 to below 1, such as 0.6"""
    output: Path = Path("plot.png")
    """file to write: .png, .svg or .pdf"""


def main(argv: Sequence[str]) -> int:
    """Write the picture and print its path; return 0.

    Raises:
        UsageError: a folder holds no run or no metrics, a metric is in none of the runs, or the
            picture can't be written.
    """
    flags = read_flags(Flags, argv, program("plot"))
    if not 0 <= flags.smooth < 1:
        raise UsageError(f"--smooth is {flags.smooth:g}: from 0 (as measured) to below 1")
    drawn = figure(load(flags.folders), flags.metrics, flags.x, flags.smooth)
    try:
        with warnings.catch_warnings():
            # matplotlib warns of a character that no font has, and prints it: it may be part of an
            # escape code.
            warnings.simplefilter("ignore")
            drawn.savefig(flags.output, dpi=120)
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for an unknown format
        reason = getattr(error, "strerror", error)
        raise UsageError(f"can't write {flags.output}: {reason}; change --output") from None
    print(flags.output)
    return 0


def figure(
    runs: Sequence[Curves], metrics: Sequence[str] = (), x: X = "step", smooth: float = 0.0
) -> Figure:
    """Return a figure with a panel for each metric, and a colour for each run.

    Args:
        runs: from `load`.
        metrics: a panel each; if none, all except LEFT_OUT, with training and validation together.
        x: the x axis.
        smooth: weight of the past in a moving average; the measured values are drawn pale under it.

    Raises:
        UsageError: a metric is in none of the runs, or a run lacks what x needs.
    """
    # A dollar sign in the name of a metric or a run does not begin a formula.
    matplotlib.rcParams["text.parse_math"] = False
    panels = choose(runs, metrics)
    unit, places = positions(runs, x)
    shades = matplotlib.colormaps["turbo"].resampled(len(runs))
    colours = [f"C{i}" if len(runs) <= 10 else shades(i) for i in range(len(runs))]
    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = math.ceil(len(panels) / columns)
    # A line of the legend is 0.2 inches high.
    size = (max(5.0 * columns, 6.5), 3.2 * rows + 0.2 * len(runs) + 0.3)
    drawn = Figure(figsize=size, layout="constrained")
    for number, (title, members) in enumerate(panels.items(), 1):
        first = drawn.axes[0] if drawn.axes else None  # its x axis is that of all panels
        axes = drawn.add_subplot(rows, columns, number, xlabel=unit, sharex=first)
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
        draw_panel(axes, members, list(zip(runs, places, colours, strict=True)), smooth)
    handles = [Line2D([], [], color=colour, linewidth=2) for colour in colours]
    drawn.legend(handles, labels(runs), loc="outside lower center", fontsize=9, frameon=False)
    return drawn


def choose(runs: Sequence[Curves], metrics: Sequence[str]) -> dict[str, list[str]]:
    """Return the metrics of each panel, by its title.

    Raises:
        UsageError: a metric is in none of the runs.
    """
    names = {name for run in runs for line in run.lines for name in line if name not in NOT_METRICS}
    for metric in metrics:
        if metric not in names:
            known = ", ".join(sorted(names))
            raise UsageError(f"no run has '{metric}' among its metrics: {known}")
    if metrics:
        return {metric: [metric] for metric in metrics}
    panels: dict[str, list[str]] = {}
    for name in sorted(names):
        if not name.startswith(LEFT_OUT):
            title = name.removeprefix("train/").removeprefix("validation/").replace("_", " ")
            panels.setdefault(title, []).append(name)
    # The losses come first.
    return dict(sorted(panels.items(), key=lambda panel: (not panel[0].endswith("loss"), panel[0])))


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the moving average in which the past has a weight, from 0 to below 1.

    The first averages are corrected for their bias, as in Adam (Kingma and Ba, 2015, section 3).
    """
    sums = accumulate(values, lambda past, value: weight * past + (1 - weight) * value, initial=0.0)
    return [total / (1 - weight**number) for number, total in enumerate(sums) if number]


def draw_panel(
    axes: Axes,
    metrics: Sequence[str],
    runs: Sequence[tuple[Curves, Sequence[float], Any]],
    smooth: float,
) -> None:
    """Draw metrics of all runs, with a legend of the metrics if there are several.

    Args:
        runs: each with the positions of its lines, and its colour.
    """
    shown = {}
    for metric, style in zip(metrics, STYLES, strict=False):
        for run, places, colour in runs:
            pairs = zip(places, run.lines, strict=True)
            points = [(x, line[metric]) for x, line in pairs if is_number(line.get(metric))]
            if not points:
                continue
            xs, ys = map(list, zip(*points, strict=True))
            look: dict[str, Any] = {"linestyle": style, "linewidth": 1.5}
            if len(points) <= FEW_VALUES:
                look |= {"marker": "o", "markersize": 3}
            elif smooth and not metric.startswith("train/lr"):  # learning rates have no noise
                axes.plot(xs, ys, alpha=0.25, color=colour, **look)
                ys = smoothed(ys, smooth)
            axes.plot(xs, ys, color=colour, **look)
            shown[metric] = Line2D([], [], color="black", label=metric.split("/")[0], **look)
    if len(shown) > 1:
        axes.legend(handles=list(shown.values()), fontsize=9)
