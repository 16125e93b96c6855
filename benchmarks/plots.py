"""Draws the results: `python -m benchmarks.plots RESULTS.json...` writes pictures next to them."""

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .compare import Comparison

COLUMNS = 3
STYLE: dict[str, Any] = {"color": "#d9d9d9", "linewidth": 0.6}  # of grid lines
OURS, OTHERS, TARGET = "#1f6fb4", "#8a8a8a", "#c0392b"


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw how each quantity grows with the world, in a panel for each title.

    Args:
        results: content of a file of results. Results with `sizes` are drawn.
        path: path of the picture to write.
    """
    grown = [each for each in results["comparisons"].values() if "sizes" in each]
    rows = -(-len(grown) // COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 3.1 * rows), layout="constrained", facecolor="white")
    grid = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes, each in zip(grid, grown, strict=False):
        _draw_growth(axes, each)
    for axes in grid[len(grown) :]:
        axes.set_axis_off()
    figure.savefig(path, dpi=110)


def _draw_growth(axes: Axes, growth: Mapping[str, Any]) -> None:
    sizes, figures = growth["sizes"], growth["figures"]
    for name, values in figures.items():
        axes.plot(sizes, values, marker="o", markersize=3.5, linewidth=1.4, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    low = min(min(values) for values in figures.values())
    high = max(max(values) for values in figures.values())
    room = max(1.6, (1000 * low / high) ** 0.5)  # three decades, so that flat looks flat
    axes.set_ylim(low / room, high * room)
    axes.set_title(growth["title"].removeprefix("Growth: "), fontsize=9.5)
    axes.set_ylabel(growth["unit"], fontsize=8)
    axes.set_xlabel("ranks", fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.grid(**STYLE)
    axes.legend(fontsize=7, framealpha=0.8)


def draw_ratios(results: Mapping[str, Any], path: Path) -> None:
    """Draw each contestant's ratio to its baseline, in a row for each, below the title.

    Args:
        results: content of a file of results. Results with a `baseline` are drawn.
        path: path of the picture to write.
    """
    compared = [each for each in results["comparisons"].values() if "baseline" in each]
    rows = sum(len(each["figures"]) for each in compared)  # a title has the row of its baseline
    figure = Figure(figsize=(10, 0.9 + 0.26 * rows), layout="constrained", facecolor="white")
    axes = figure.subplots()
    names: list[str] = []
    for each in compared:
        bold = each["title"].translate({ord("`"): None})
        title = f"{bold}, {each['unit']}; 1: {each['baseline']}"
        place = axes.get_yaxis_transform()  # x from the left edge, not in ratios
        axes.text(0.01, len(names), title, transform=place, va="center", size=8, weight="bold")
        names.append("")
        ratios = {
            name: x for name, x in Comparison(**each).ratios.items() if name != each["baseline"]
        }
        mine = next(iter(each["figures"]))
        for name, ratio in ratios.items():
            color = OURS if name == mine else OTHERS
            _draw_ratio(axes, len(names), ratio, color)
            if color == OURS and each["limit"]:
                axes.plot(each["limit"], len(names), "|", color=TARGET, markersize=14, mew=2)
            names.append(name)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.6, high * 1.6)  # room for the numbers
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(
        "ratio to the baseline in the same turn; red: this project's target", fontsize=8
    )
    figure.savefig(path, dpi=110)


def _draw_ratio(axes: Axes, row: int, ratio: float, color: str) -> None:
    if not math.isfinite(ratio):
        return
    axes.plot([1, ratio], [row, row], color=color, linewidth=1.2)
    axes.plot(ratio, row, "o", color=color, markersize=5)
    outward = 1 if ratio >= 1 else -1
    axes.annotate(
        f"{ratio:.2f}",
        (ratio, row),
        (9 * outward, 0),
        textcoords="offset points",
        fontsize=8,
        horizontalalignment="left" if outward > 0 else "right",
        verticalalignment="center",
    )


def main(paths: list[str]) -> None:
    """Draw each file of results as pictures next to it: NAME-growth.png, NAME-ratios.png."""
    for path in map(Path, paths):
        results = json.loads(path.read_text("utf-8"))
        kinds = [set(each) for each in results["comparisons"].values()]
        if any("sizes" in kind for kind in kinds):
            draw(results, path.with_name(f"{path.stem}-growth.png"))
        if any("baseline" in kind for kind in kinds):
            draw_ratios(results, path.with_name(f"{path.stem}-ratios.png"))


if __name__ == "__main__":
    main(sys.argv[1:])
