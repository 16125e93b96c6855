"""Draw the figure of README.md: a run without a stop, and the same run preempted once, over time.

    .venv/bin/python scripts/draw_run.py RUNS docs/run

RUNS has the folders `uninterrupted` and `preempted`: two runs with the same settings. The figure is
written twice, as docs/run-light.svg and docs/run-dark.svg.
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

SIZE = (8.6, 3.4)  # inches
# By name: the colours of text, of the run without a stop, of the preempted run, and of its wait.
THEMES = {
    "light": ("#1f2328", "#8c959f", "#0969da", "#d1242f"),
    "dark": ("#e6edf3", "#7d8590", "#58a6ff", "#f85149"),
}


def read(run: Path) -> tuple[list[float], list[int]]:
    """Return the seconds since the first logged step, and the steps, of a run's log lines."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    times, steps = zip(*((line["time"], line["step"]) for line in lines), strict=True)
    return [each - times[0] for each in times], list(steps)


def draw(runs: Path, theme: str) -> Figure:
    """Return the figure in the colours of a theme.

    Raises:
        ValueError: the runs have not ended with the same parameters.
    """
    names = ("uninterrupted", "preempted")
    ends = {json.loads((runs / n / "summary.json").read_text())["parameters_sha256"] for n in names}
    if len(ends) != 1:
        raise ValueError(f"{runs}: the runs must end with the same parameters")
    text, plain, blue, red = THEMES[theme]
    figure, axes = blank(text, plain)

    def say(words: str, at: tuple[float, float], offset: tuple[int, int], **how: Any) -> None:  # noqa: ANN401
        axes.annotate(words, at, offset, textcoords="offset points", **{"color": text, **how})

    times, steps = read(runs / "uninterrupted")
    axes.plot(times, steps, color=plain, linewidth=2.5)
    middle, end = len(times) // 2, (times[-1], steps[-1])
    say("not stopped", (times[middle], steps[middle]), (-10, 6), ha="right", color=plain)

    times, steps = read(runs / "preempted")
    gap = max(range(len(times) - 1), key=lambda each: times[each + 1] - times[each])
    for part in (slice(None, gap + 1), slice(gap + 1, None)):
        axes.plot(times[part], steps[part], color=blue, linewidth=2.5)
    left, right = ((time, steps[gap]) for time in times[gap : gap + 2])
    axes.plot(*zip(left, right, strict=True), color=red, linewidth=2, linestyle=":")
    say("waits in the queue", left, (2, -6), va="top", color=red)
    say("preempted:\nsaves a checkpoint", left, (2, -24), va="top")
    say("resumes at the\nnext sample", right, (24, -8), va="top")

    last = (times[-1], steps[-1])
    axes.plot(*zip(end, last, strict=True), color=text, linewidth=1, linestyle=":")
    for place, colour in ((end, plain), (last, blue)):
        axes.plot(*place, marker="o", markersize=8, color=colour)
    between = ((end[0] + last[0]) / 2, end[1])
    say("same parameters, bit for bit", between, (0, 9), ha="center", weight="bold")
    axes.set_ylim(0, steps[-1] * 1.16)
    return figure


def blank(text: str, plain: str) -> tuple[Figure, Axes]:
    """Return a figure without background, with the axes of time and steps in two colours."""
    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    for each in (figure, axes):
        each.patch.set_alpha(0)
    axes.set_xlabel("seconds", color=text)
    axes.set_ylabel("training step", color=text)
    axes.tick_params(colors=text)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(plain)
    return figure, axes


def main() -> None:
    """Write the figure once for each theme."""
    if len(sys.argv) != 3:
        sys.exit("error: expected: draw_run.py RUNS OUTPUT")
    runs, output = map(Path, sys.argv[1:])
    mpl.rcParams["svg.hashsalt"] = "the same ids each time"
    for theme in THEMES:
        path = output.with_name(f"{output.name}-{theme}.svg")
        draw(runs, theme).savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
