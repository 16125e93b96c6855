"""Draws the metrics of runs to a picture: `python -m <package> plot RUN_DIR... [--x time]`.

It needs no server, no display and no torch. curves.py reads the metrics, panels.py draws them.
"""

import dataclasses
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import matplotlib
import tyro
from matplotlib.figure import Figure  # not pyplot: it looks for a display and keeps figures
from matplotlib.lines import Line2D

from ...engine.config import read_flags
from ...engine.errors import UsageError
from .. import program
from .curves import Curves, group, load
from .panels import MEANING, choose, colours_of, draw


@dataclasses.dataclass(frozen=True)
class Flags:
    """Draw curves of runs to a picture."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR...")]
    """folders of runs, or of experiments for all their runs"""
    metrics: tuple[str, ...] = ()
    """metrics to draw, a panel each; else all, with training and validation in one panel"""
    x: Literal["step", "time"] = "step"
    """the x axis; time counts from a run's first line and includes waits in the queue"""
    seeds: Literal["mean", "each"] = "mean"
    """mean: runs of the same code and settings but for the seed are one curve, the mean of those
    that have a value at a step, in a band from the smallest to the largest value; each: a curve for
    each run, as always over time"""
    smooth: float = 0.0
    """weight of the past in a moving average of each run, from 0 to below 1, such as 0.6"""
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
    runs = load(flags.folders)
    drawn = figure(runs, flags.metrics, flags.x, flags.smooth, flags.seeds == "mean")
    try:
        drawn.savefig(flags.output, dpi=120)
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for an unknown format
        reason = getattr(error, "strerror", error)
        raise UsageError(f"can't write {flags.output}: {reason}; change --output") from None
    print(flags.output)
    return 0


def figure(
    runs: Sequence[Curves],
    metrics: Sequence[str] = (),
    x: str = "step",
    smooth: float = 0.0,
    together: bool = True,
) -> Figure:
    """Return a figure with a panel for each metric, and a colour for each group of runs.

    Args:
        runs: from `load`.
        metrics: a panel each; if none, all except LEFT_OUT, with training and validation together.
        x: the x axis, step or time.
        smooth: weight of the past in a moving average; the measured values are drawn pale under it.
        together: whether runs that differ only in their seed are a group. Over time they are not:
            they are at the same step at different times.

    Raises:
        UsageError: a metric is in none of the runs.
    """
    # A dollar sign in the name of a metric or a run does not begin a formula.
    matplotlib.rcParams["text.parse_math"] = False
    panels, groups = choose(runs, metrics), group(runs, together and x == "step")
    columns = max(1, min(len(panels), 2 if len(panels) <= 4 else 3))
    rows = math.ceil(len(panels) / columns)
    # A line of the legend is 0.2 inches high.
    size = (max(5.0 * columns, 6.5), 3.2 * rows + 0.2 * len(groups) + 0.3)
    drawn = Figure(figsize=size, layout="constrained")
    for number, (title, members) in enumerate(panels.items(), 1):
        first = drawn.axes[0] if drawn.axes else None  # all panels share its x axis
        axes = drawn.add_subplot(rows, columns, number, sharex=first, title=title)
        draw(axes, groups, members, "hours" if x == "time" else x, smooth)
    handles = [Line2D([], [], color=colour, linewidth=2) for colour in colours_of(groups)]
    drawn.legend(
        handles,
        [each.label for each in groups],
        title=MEANING if any(len(each.runs) > 1 for each in groups) else None,
        loc="outside lower center",
        frameon=False,
    )
    return drawn
