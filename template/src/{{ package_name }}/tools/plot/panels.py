"""Draws curves of groups of runs on the axes of matplotlib."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D

from ...engine.errors import UsageError
from .curves import Curves, Group

# Metrics that are drawn only if they are named.
LEFT_OUT = (
    *("system/", "test/", "train/data_seconds", "train/gradient_norm"),
    "train/slowest_hook_seconds",
)
STYLES = ("-", "--", ":")  # of the metrics of a panel
FEW_VALUES = 20  # a curve of so many or fewer is drawn with dots, and not smoothed
SECONDS = {"hours": 3600, "minutes": 60}
PALE = 0.35  # opacity of a mean over some seeds only
MEANING = "mean over seeds, band from min to max; pale: not all seeds have a value"
Points = list[tuple[float, float]]


def choose(runs: Iterable[Curves], metrics: Sequence[str] = ()) -> dict[str, list[str]]:
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


def colours_of(groups: Sequence[Group]) -> list[str]:
    """Return a colour for each group, as #rrggbb."""
    shades = matplotlib.colormaps["turbo"].resampled(len(groups))
    return [to_hex(f"C{i}" if len(groups) <= 10 else shades(i)) for i in range(len(groups))]


def draw(
    axes: Axes,
    groups: Sequence[Group],
    metrics: Sequence[str],
    x: str = "step",
    smooth: float = 0.0,
    most: int | None = None,
) -> None:
    """Draw a panel: a colour for each group, and a style for each metric.

    Args:
        axes: to draw on.
        groups: from `group`; those of several runs are drawn over steps only.
        metrics: names of up to three.
        x: the x axis, step or a unit of time.
        smooth: weight of the past in a moving average; the measured values are drawn pale under it.
        most: points of a curve, about; those between the extremes of a stretch are left out.
    """
    axes.set_xlabel(x)
    axes.grid(alpha=0.3)
    styles = {}
    for metric, style in zip(metrics, STYLES, strict=False):
        past = 0.0 if metric.startswith("train/lr") else smooth  # learning rates have no noise
        for each, colour in zip(groups, colours_of(groups), strict=True):
            curves = [curve for run in each.runs if (curve := _points(run, metric, x))]
            if not curves:
                continue
            look: dict[str, Any] = {"linestyle": style, "linewidth": 1.5}
            if max(map(len, curves)) <= FEW_VALUES:
                look |= {"marker": "o", "markersize": 3}
            elif past:
                if len(each.runs) == 1:
                    _draw_mean(axes, curves, 1, {**look, "color": colour, "alpha": 0.25}, most)
                curves = [_smoothed(curve, past) for curve in curves]
            _draw_mean(axes, curves, len(each.runs), {**look, "color": colour}, most)
            styles[metric] = Line2D([], [], color="black", label=metric.split("/")[0], **look)
    if len(styles) > 1:
        axes.legend(handles=list(styles.values()), fontsize=9)


def _points(run: Curves, metric: str, x: str) -> Points:
    """Return x and y of a curve; time counts from the run's first line."""
    if x == "step":
        return [(line[x], line[metric]) for line in run.lines if metric in line]
    lines = [line for line in run.lines if {"time", metric} <= set(line)]
    began, unit = run.lines[0].get("time", 0), SECONDS[x]
    return [((line["time"] - began) / unit, line[metric]) for line in lines]


def _smoothed(curve: Points, past: float) -> Points:
    xs, ys = zip(*curve, strict=True)
    means = accumulate(ys, lambda before, y: past * before + (1 - past) * y)
    return list(zip(xs, means, strict=True))


def _draw_mean(
    axes: Axes, curves: Sequence[Points], number: int, look: Mapping[str, Any], most: int | None
) -> None:
    """Draw the mean over the runs that have a value at a step, and the band from min to max.

    Args:
        number: of runs; where not all have a value, the mean is pale.
    """
    at: dict[float, list[float]] = {}
    for curve in curves:
        for x, y in dict(curve).items():
            at.setdefault(x, []).append(y)
    xs = list(at) if number == 1 else sorted(at)
    means, lows, highs = ([of(at[x]) for x in xs] for of in (fmean, min, max))
    kept = _kept((means, lows, highs), most)
    if number > 1:
        band = [i for i in kept if len(at[xs[i]]) > 1]  # one value alone would look certain
        at_x, low, high = ([values[i] for i in band] for values in (xs, lows, highs))
        axes.fill_between(at_x, low, high, color=look["color"], alpha=0.2, linewidth=0)
        if "marker" in look:  # a band over one step can't be seen
            axes.vlines(at_x, low, high, color=look["color"], alpha=PALE)
    shown = [xs[i] for i in kept]
    whole = [means[i] if len(at[xs[i]]) == number else math.nan for i in kept]
    if any(map(math.isnan, whole)):
        axes.plot(shown, [means[i] for i in kept], **{**look, "alpha": PALE})
    axes.plot(shown, whole, **look)


def _kept(series: Sequence[Sequence[float]], most: int | None) -> Sequence[int]:
    """Return which values to draw: of each stretch the extremes, so that no peak is lost."""
    count = len(series[0])
    if not most or count <= most:
        return range(count)
    kept, size = {0, count - 1}, math.ceil(2 * len(series) * count / most)
    for begin in range(0, count, size):
        stretch = range(begin, min(begin + size, count))
        for values in series:
            kept |= {of(stretch, key=values.__getitem__) for of in (min, max)}
    return sorted(kept)
