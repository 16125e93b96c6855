"""Draws the metrics of runs. It needs no display and no PyTorch. curves.py reads the metrics."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure  # pyplot would look for a display and keep all figures
from matplotlib.lines import Line2D

from ...engine.errors import UsageError
from .curves import Curves, Group, group

# Metrics that are drawn only if --metrics names them.
LEFT_OUT = ("system/", "test/", "train/data_seconds", "train/gradient_norm", "train/slowest_hook")
STYLES = ("-", "--", ":")  # line styles of the metrics in a panel
FEW_VALUES = 20  # a curve with at most this many values is drawn with dots, and is not smoothed
UNITS = {"step": 1, "seconds": 1, "minutes": 60, "hours": 3600}  # of the x axis; time in seconds
MEANING = "mean over seeds, band from min to max; pale: not all seeds have a value"
# Without this, a dollar sign in the name of a metric or a run would begin a formula.
matplotlib.rcParams["text.parse_math"] = False


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
        metrics: each gets a panel; if empty, all except LEFT_OUT, with training and validation
            together.
        x: step or time.
        smooth: weight of the past in a moving average of each curve.
        together: whether runs that differ only in their seed are one group; only over steps.

    Raises:
        UsageError: no run has one of the metrics.
    """
    panels, groups = choose(runs, metrics), group(runs, together and x == "step")
    columns = max(1, min(len(panels), 2 if len(panels) <= 4 else 3))
    rows = math.ceil(len(panels) / columns)
    # In inches; a line of the legend is 0.2 inches high.
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


def choose(runs: Iterable[Curves], metrics: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the metrics of each panel by its title.

    Raises:
        UsageError: no run has one of the metrics.
    """
    # The names of metrics contain a slash; step, time and epoch contain none.
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


def colours_of(groups: Sequence[Group]) -> list[str]:
    """Return a colour for each group, as #rrggbb."""
    shades = matplotlib.colormaps["turbo"].resampled(len(groups))
    return [to_hex(f"C{i}" if len(groups) <= 10 else shades(i)) for i in range(len(groups))]


def draw(
    axes: Axes, groups: Sequence[Group], metrics: Sequence[str], x: str = "step", smooth: float = 0
) -> None:
    """Draw a panel: a colour for each group, and a style for each metric.

    Args:
        groups: from `group`. Groups of several runs are drawn only over steps.
        x: one of UNITS.
        smooth: weight of the past in a moving average. The measured values are drawn pale behind
            it.
    """
    axes.set_xlabel(x)
    axes.grid(alpha=0.3)
    styles = {}
    for metric, style in zip(metrics, STYLES, strict=False):
        past = 0 if metric.startswith("train/lr") else smooth  # learning rates have no noise
        for each, colour in zip(groups, colours_of(groups), strict=True):
            curves = [curve for run in each.runs if (curve := _points(run, metric, x))]
            if not curves:
                continue
            look: dict[str, Any] = {"linestyle": style, "linewidth": 1.5, "color": colour}
            if max(map(len, curves)) <= FEW_VALUES:
                look |= {"marker": "o", "markersize": 3}
            elif past:
                if len(each.runs) == 1:
                    _draw_mean(axes, curves, 1, {**look, "alpha": 0.25})
                curves = [_smoothed(curve, past) for curve in curves]
            _draw_mean(axes, curves, len(each.runs), look)
            label = metric.split("/")[0]
            styles[metric] = Line2D([], [], label=label, **{**look, "color": "black"})
    if len(styles) > 1:
        axes.legend(handles=list(styles.values()), fontsize=9)


def _points(run: Curves, metric: str, x: str) -> dict[float, float]:
    """Return the values of a metric by x. Time starts at the run's first line."""
    name, began = ("step", 0) if x == "step" else ("time", run.lines[0].get("time", 0))
    lines = [line for line in run.lines if {name, metric} <= set(line)]
    return {(line[name] - began) / UNITS[x]: line[metric] for line in lines}


def _smoothed(curve: Mapping[float, float], past: float) -> dict[float, float]:
    means = accumulate(curve.values(), lambda before, y: past * before + (1 - past) * y)
    return dict(zip(curve, means, strict=True))


def _draw_mean(
    axes: Axes, curves: Sequence[Mapping[float, float]], number: int, look: Mapping[str, Any]
) -> None:
    """Draw the mean at each step, with a band; it is pale where not all runs have a value."""
    at: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in curve.items():
            at.setdefault(x, []).append(y)
    at = dict(sorted(at.items()))
    means = list(map(fmean, at.values()))
    if number > 1:
        band = {x: ys for x, ys in at.items() if len(ys) > 1}  # one run alone gives no band
        low, high = (list(map(of, band.values())) for of in (min, max))
        axes.fill_between(list(band), low, high, color=look["color"], alpha=0.2, linewidth=0)
        axes.plot(list(at), means, **{**look, "alpha": 0.35})
    whole = [len(ys) == number for ys in at.values()]
    axes.plot(list(at), [y if w else math.nan for y, w in zip(means, whole, strict=True)], **look)
