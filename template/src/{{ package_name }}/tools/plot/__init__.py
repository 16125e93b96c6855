"""Draws the metrics of runs to a picture: `python -m <package> plot RUN_DIR... [--x time]`.

It needs no server, no display and no torch. curves.py reads the metrics.
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import matplotlib
import tyro
from matplotlib.figure import Figure  # not pyplot: it looks for a display and keeps figures
from matplotlib.lines import Line2D

from ...engine.config import read_flags
from ...engine.errors import UsageError
from .. import program
from .curves import Curves, load

# Metrics that are drawn only if --metrics names them.
LEFT_OUT = ("system/", "test/", "train/data_seconds", "train/gradient_norm")
STYLES = ("-", "--", ":")  # of the metrics of a panel
FEW_VALUES = 20  # a curve of so many or fewer is drawn with dots, and not smoothed


@dataclasses.dataclass(frozen=True)
class Flags:
    """Draw curves of runs to a picture."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR...")]
    """folders of runs, or of experiments for all their runs"""
    metrics: tuple[str, ...] = ()
    """metrics to draw, a panel each; else all, with training and validation in one panel"""
    x: Literal["step", "time"] = "step"
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
    # matplotlib prints characters that no font has, which may be part of an escape code.
    warnings.simplefilter("ignore")
    drawn = figure(load(flags.folders), flags.metrics, flags.x, flags.smooth)
    try:
        drawn.savefig(flags.output, dpi=120)
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for an unknown format
        reason = getattr(error, "strerror", error)
        raise UsageError(f"can't write {flags.output}: {reason}; change --output") from None
    print(flags.output)
    return 0


def figure(
    runs: Sequence[Curves], metrics: Sequence[str] = (), x: str = "step", smooth: float = 0.0
) -> Figure:
    """Return a figure with a panel for each metric, and a colour for each run.

    Args:
        runs: from `load`.
        metrics: a panel each; if none, all except LEFT_OUT, with training and validation together.
        x: the x axis, step or time.
        smooth: weight of the past in a moving average; the measured values are drawn pale under it.

    Raises:
        UsageError: a metric is in none of the runs.
    """
    # A dollar sign in the name of a metric or a run does not begin a formula.
    matplotlib.rcParams["text.parse_math"] = False
    panels = choose(runs, metrics)
    shades = matplotlib.colormaps["turbo"].resampled(len(runs))
    colours = [f"C{i}" if len(runs) <= 10 else shades(i) for i in range(len(runs))]
    columns = max(1, min(len(panels), 2 if len(panels) <= 4 else 3))
    rows = math.ceil(len(panels) / columns)
    # A line of the legend is 0.2 inches high.
    size = (max(5.0 * columns, 6.5), 3.2 * rows + 0.2 * len(runs) + 0.3)
    drawn = Figure(figsize=size, layout="constrained")
    for number, (title, members) in enumerate(panels.items(), 1):
        first = drawn.axes[0] if drawn.axes else None  # all panels share its x axis
        axes = drawn.add_subplot(rows, columns, number, sharex=first)
        axes.set(title=title, xlabel="hours" if x == "time" else x)
        axes.grid(alpha=0.3)
        styles = {}
        for metric, style in zip(members, STYLES, strict=False):
            for run, colour in zip(runs, colours, strict=True):
                points = [(line[x], line[metric]) for line in run.lines if {x, metric} <= set(line)]
                if not points:
                    continue
                look: dict[str, Any] = {"linestyle": style, "linewidth": 1.5}
                xs, ys = map(list, zip(*points, strict=True))
                if x == "time":
                    xs = [(time - run.lines[0].get("time", 0)) / 3600 for time in xs]
                if len(points) <= FEW_VALUES:
                    look |= {"marker": "o", "markersize": 3}
                elif smooth and not metric.startswith("train/lr"):  # learning rates have no noise
                    axes.plot(xs, ys, alpha=0.25, color=colour, **look)
                    ys = list(accumulate(ys, lambda past, y: smooth * past + (1 - smooth) * y))
                axes.plot(xs, ys, color=colour, **look)
                styles[metric] = Line2D([], [], color="black", label=metric.split("/")[0], **look)
        if len(styles) > 1:
            axes.legend(handles=list(styles.values()), fontsize=9)
    handles = [Line2D([], [], color=colour, linewidth=2) for colour in colours]
    drawn.legend(handles, [run.label for run in runs], loc="outside lower center", frameon=False)
    return drawn


def choose(runs: Sequence[Curves], metrics: Sequence[str]) -> dict[str, list[str]]:
    """Return the metrics of each panel, by its title.

    Raises:
        UsageError: a metric is in none of the runs.
    """
    # The names of metrics have a slash; step, time and epoch have none.
    names = {name for run in runs for line in run.lines for name in line if "/" in name}
    if missing := set(metrics) - names:
        known = ", ".join(sorted(names))
        raise UsageError(f"no run has '{min(missing)}' among its metrics: {known}")
    if metrics:
        return {metric: [metric] for metric in metrics}
    panels: dict[str, list[str]] = {}
    for name in sorted(names):
        if not name.startswith(LEFT_OUT):
            title = name.removeprefix("train/").removeprefix("validation/").replace("_", " ")
            panels.setdefault(title, []).append(name)
    return panels
