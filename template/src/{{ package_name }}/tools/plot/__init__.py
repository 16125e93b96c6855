"""Curves of runs, drawn to a picture: no server, no display, no torch.

    python -m <package> plot RUN_DIR... [--metrics train/loss validation/accuracy] [--x time]

What is drawn is read in curves.py.
"""

import dataclasses
import difflib
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ...core.config import read_flags
from ...core.errors import UsageError
from .. import program
from .curves import Curves, Points, X, labels, load, points, positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Metrics that are drawn only where --metrics asks for them.
LEFT_OUT = ("system/", "test/", "train/data_seconds", "train/gradient_norm")
SPLITS = ("train", "validation")
STYLES = ("-", "--", ":")  # of the metrics of a panel
NOT_METRICS = ("step", "time", "epoch")
FORMATS = (".png", ".svg", ".pdf")
FEW_VALUES = 20  # so many are not smoothed


@dataclasses.dataclass(frozen=True)
class Flags:
    """Draw curves of runs to a picture."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR...")]
    """folders of runs, or of experiments for all their runs"""
    metrics: tuple[str, ...] = ()
    """metrics to draw, a panel each; else all of training and validation, a panel a name"""
    x: X = "step"
    """what the curves run over; time is since a run's first line, waits in the queue included"""
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
    if flags.output.suffix.lower() not in FORMATS:
        raise UsageError(f"--output is {flags.output}: end its name in {', '.join(FORMATS)}")
    if not 0 <= flags.smooth < 1:
        raise UsageError(f"--smooth is {flags.smooth:g}: from 0 (as measured) to below 1")
    drawn = figure(load(flags.folders), flags.metrics, flags.x, flags.smooth)
    try:
        with warnings.catch_warnings():
            # Of a letter that no font has, which may be part of an escape code.
            warnings.simplefilter("ignore")
            drawn.savefig(flags.output, dpi=120)
    except OSError as error:
        raise UsageError(
            f"can't write {flags.output}: {error.strerror}; choose another with --output"
        ) from None
    print(flags.output)
    return 0


def figure(
    runs: Sequence[Curves], metrics: Sequence[str] = (), x: X = "step", smooth: float = 0.0
) -> "Figure":
    """Return a figure with a panel for each metric, and a colour for each run.

    Args:
        runs: as `load` returned them.
        metrics: a panel each; if none, all but those LEFT_OUT, of training and validation together.
        x: what the curves run over.
        smooth: weight of the past in a moving average; what was measured is then drawn behind it.

    Raises:
        UsageError: a metric is in none of the runs, or a run does not tell what x needs.
    """
    # Not pyplot: it looks for a display and keeps figures. Late: it takes half a second.
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    # A metric or a run may have a dollar in its name, which is no formula.
    matplotlib.rcParams["text.parse_math"] = False
    panels = choose(runs, metrics)
    unit, places = positions(runs, x)
    colours = palette(len(runs))
    columns = min(len(panels), 2 if len(panels) <= 4 else 3)
    rows = math.ceil(len(panels) / columns)
    names = labels(runs)
    width = max(5.0 * columns, 6.5)
    # A letter of the legend is some 0.075 inches wide, its line some 0.2 high.
    in_a_row = max(1, min(len(runs), int(width / (0.075 * max(map(len, names)) + 0.6))))
    height = 3.2 * rows + 0.2 * math.ceil(len(runs) / in_a_row) + 0.3
    drawn = Figure(figsize=(width, height), layout="constrained")
    for number, (title, members) in enumerate(panels.items(), 1):
        # All over the same x, where one has a single value too.
        first = drawn.axes[0] if drawn.axes else None
        axes = drawn.add_subplot(rows, columns, number, xlabel=unit, sharex=first)
        axes.set_title(title, fontsize=11)
        axes.grid(alpha=0.3)
        draw_panel(axes, members, runs, places, colours, smooth)
    drawn.legend(
        [Line2D([], [], color=colour, linewidth=2) for colour in colours],
        names,
        loc="outside lower center",
        ncols=in_a_row,
        fontsize=9,
        frameon=False,
    )
    return drawn


def choose(runs: Sequence[Curves], metrics: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the metrics of each panel, by its title.

    Raises:
        UsageError: a metric is in none of the runs.
    """
    names = {name for run in runs for line in run.lines for name in line if name not in NOT_METRICS}
    for metric in metrics:
        if metric not in names:
            near = [name for name in sorted(names) if metric in name]
            near = near or difflib.get_close_matches(metric, sorted(names), n=3)
            says = f"did you mean {' or '.join(near)}?" if near else ", ".join(sorted(names))
            raise UsageError(f"no run has '{metric}' among its metrics: {says}")
    if metrics:
        return {metric: (metric,) for metric in metrics}
    panels: dict[str, list[str]] = {}
    for name in sorted(names, key=_order):
        if not name.startswith(LEFT_OUT):
            panels.setdefault(_title(name), []).append(name)
    return {title: tuple(members) for title, members in panels.items()}


def _title(name: str) -> str:
    """Return the panel of a metric: its name without the split, in words."""
    split, _, rest = name.partition("/")
    return (rest if split in SPLITS else name).replace("_", " ")


def _order(name: str) -> tuple[int, str, str]:
    """Return where a metric stands: losses, what is measured, then what is set and the rates."""
    split, _, rest = name.partition("/")
    last = name.startswith("train/lr") or name.endswith("_per_second")
    return (0 if rest.endswith("loss") else 2 if last else 1, rest, split)


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """Return the moving average in which the past has a weight, from 0 to below 1.

    Its start is corrected for having no past, as Adam's averages are (Kingma and Ba, 2015,
    section 3).
    """
    average, found = 0.0, []
    for number, value in enumerate(values, 1):
        average = weight * average + (1 - weight) * value
        found.append(average / (1 - weight**number))
    return found


def draw_panel(
    axes: "Axes",
    metrics: Sequence[str],
    runs: Sequence[Curves],
    places: Sequence[Sequence[float]],
    colours: Sequence[Any],
    smooth: float,
) -> None:
    """Draw metrics of all runs over the places of their lines, with a legend of what is drawn."""
    from matplotlib.lines import Line2D

    shown = []
    for metric, style in zip(metrics, STYLES, strict=False):
        exact = metric.startswith("train/lr")  # nothing measured
        curves = [points(run, metric, xs) for run, xs in zip(runs, places, strict=True)]
        for curve, colour in zip(curves, colours, strict=True):
            draw(axes, curve, style, colour, 0.0 if exact else smooth)
        if longest := max(map(len, curves)):
            label = metric.split("/")[0]
            shown.append(Line2D([], [], color="black", label=label, **look(longest, style)))
    if len(shown) > 1:
        axes.legend(handles=shown, fontsize=9)


def draw(axes: "Axes", curve: Points, style: str, colour: Any, smooth: float) -> None:  # noqa: ANN401
    """Draw a curve: smoothed, with what was measured behind it; of few values, dots and all."""
    if not curve:
        return
    xs, ys = zip(*curve, strict=True)
    options = {"color": colour, "linewidth": 1.5, **look(len(xs), style)}
    if len(xs) <= FEW_VALUES:
        smooth = 0.0
    if smooth:
        axes.plot(xs, ys, alpha=0.25, **options)
    axes.plot(xs, smoothed(ys, smooth), **options)


def look(values: int, style: str) -> dict[str, Any]:
    """Return how a curve of so many values looks: a single one is a dot without a line."""
    dots = {"marker": "o", "markersize": 3} if values <= FEW_VALUES else {}
    return {"linestyle": style if values > 1 else "none", **dots}


def palette(number: int) -> list[Any]:
    """Return colours that can be told apart, as far as there are so many."""
    from matplotlib import colormaps

    if number <= 10:
        return [f"C{i}" for i in range(number)]
    return [colormaps["turbo"](0.03 + 0.94 * i / (number - 1)) for i in range(number)]
