"""Writes a page about runs, to look at and to send: `python -m <package> report RUN_DIR...`.

It needs no server and no torch. page.py has the style of the page.
"""

import dataclasses
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import tyro

from ...engine.config import read_flags
from ...engine.errors import UsageError
from ...engine.filesystem import disk_usage, in_range, read_bytes
from ...engine.run import usage
from ...engine.run.run_lock import attempts
from .. import program
from ..plot import MEANING, UNITS, choose, colours_of
from ..plot.curves import Curves, Group, differing, group, read_runs
from ..runs import Run, find_runs, read
from ..show import about
from ..text import local_time, short
from .page import RESERVE, Html, Page, facts, make

MOST_ROWS = 100
MOST_NUMBERS = 24
MOST_ATTEMPTS = 20  # that are marked
MOST_DIFF = 100_000  # characters
LOG_LINES, LOG_WIDTH = 50, 400
OVER_TIME = re.compile(r"train/\w+_per_second|system/(gpu|cpu)_percent")
MARKS = "Dotted: the run was stopped, and went on later. Grey: a process was training."
FACTS = ("settings", "command", "commit", "code", "attempts", "nodes", "versions", "files")


@dataclasses.dataclass(frozen=True)
class Flags:
    """Write a page about runs: status, numbers, curves, settings, code, figures, log. It is one
    file of at most a megabyte, without scripts, that loads nothing from elsewhere."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR...")]
    """folders of runs, or of experiments for all their runs, which are compared; those that differ
    only in their seed are one curve, their mean"""
    output: Path = Path("report.html")
    """file to write"""


def main(argv: Sequence[str]) -> int:
    """Write the page and print its path; return 0.

    Raises:
        UsageError: a folder holds no run, or the page can't be written.
    """
    flags = read_flags(Flags, argv, program("report"))
    warnings.simplefilter("ignore")  # of characters that no font has
    folders = find_runs(flags.folders)
    if not folders:
        raise UsageError("nothing to report: name folders of runs, or folders that hold some")
    try:
        flags.output.write_text(page_of(read_runs(folders)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can't write {flags.output}: {error.strerror}; change --output") from None
    print(flags.output)
    return 0


def page_of(runs: Sequence[Curves]) -> str:
    """Return the page about runs as HTML; what has no room is named at its end."""
    page = Page(runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    if len(runs) > 1:
        _add_overview(page, runs)
    for each in runs:
        if page.room > RESERVE:
            _add_run(page, each, "h1" if len(runs) == 1 else "h2")
        else:
            page.left_out.append(short(each.name, 80))
    return page.text()


def _add_overview(page: Page, runs: Sequence[Curves]) -> None:
    """Add a table of the runs, and their curves together."""
    differ = differing(runs)
    rows = []
    for each in runs[:MOST_ROWS]:
        spent, state = usage.total(each.run.folder), each.run.state
        score = state.get("best_score")
        settings = " ".join(f"{name}={short(each.settings.get(name))}" for name in differ)
        cells = (
            make("b", short(each.name, 100)),
            _badge(each.run),
            "" if score is None else f"{state.get('best_metric')} {short(score)}",
            f"{short(state['step'])} steps" if "step" in state else "",
            f"{spent.wall_seconds / 3600:.2f} hours" if spent else "",
            f"{spent.gpu_hours:.2f} GPU-hours" if spent and spent.gpu_hours else "",
            short(settings, 200),
        )
        rows.append(make("tr", *(make("td", cell) for cell in cells)))
    page.add("table", make("h1", page.title), make("table", *rows, class_="runs"))
    if len(runs) > MOST_ROWS:
        page.left_out.append(f"{len(runs) - MOST_ROWS} rows of the table")
    if groups := group([each for each in runs if each.lines]):
        labels = [
            make("span", make("i", style=f"background:{colour}"), short(each.label))
            for each, colour in zip(groups, colours_of(groups), strict=True)
        ]
        if any(len(each.runs) > 1 for each in groups):
            labels.append(make("small", MEANING))
        page.add("legend", make("h3", "Curves"), make("p", *labels, class_="legend"))
        for name, metrics in choose(run for each in groups for run in each.runs).items():
            page.add_panel(name, groups, metrics)


def _add_run(page: Page, curves: Curves, heading: str) -> None:
    """Add what is known of a run, as far as there is room; `heading` is the tag of its title."""
    run, name, known = curves.run, curves.name, about(curves.run)
    notes = {"note": run.note, "slow": "\n".join(known["slow"])}
    notes |= dict(line.split(": ", 1) for line in known["usage"])
    page.add(name, *_status(curves, heading), facts(notes))
    if curves.lines:
        _add_curves(page, curves)
    _add_figures(page, run.folder / "figures", name)
    title = make("h3", "Where it came from")
    page.add(f"{name}: facts", title, facts({each: "\n".join(known[each]) for each in FACTS}))
    with suppress(OSError):
        text = read_bytes(run.folder / "log.txt", 2**16, last=True).decode(errors="replace")
        lines = [short(line, LOG_WIDTH) for line in text.splitlines()[-LOG_LINES:]]
        title = make("h3", "The end of the log")
        page.add(f"{name}: log", title, make("pre", "\n".join(lines)))
    if diff := curves.diff[:MOST_DIFF].expandtabs():
        summary = make("summary", f"Uncommitted changes: {len(diff.splitlines())} lines of a diff")
        page.add(f"{name}: uncommitted changes", make("details", summary, make("pre", diff)))


def _badge(run: Run) -> Html:
    """Return the status as a badge."""
    return make("span", short(run.status, 24), class_=f"status {run.status}")


def _status(curves: Curves, heading: str) -> list[Html]:
    """Return how a run stands, and its numbers."""
    run, state = curves.run, curves.run.state
    results = read(run.folder / "summary.json")
    numbers = {name: value for name, value in results.items() if name.startswith("test_")}
    if not numbers:  # the newest, of a run that goes on or failed
        numbers = {n: v for line in curves.lines for n, v in line.items() if "loss" in n}
    metric = str(state.get("best_metric")).removeprefix("validation/")
    numbers[f"best {metric}"] = state.get("best_score")
    numbers |= {"step": state.get("step"), "step of the best": state.get("best_step")}
    numbers["done"] = f"{state['progress']:.0%}" if "progress" in state else None
    shown = [
        make("div", make("b", short(value, 40)), make("small", short(name.replace("_", " "), 60)))
        for name, value in list(numbers.items())[:MOST_NUMBERS]
        if isinstance(value, float | int | str) and in_range(value)
    ]
    return [
        make(heading, f"{short(curves.name, 200)} ", _badge(run)),
        make("p", f"{run.folder}, last heard {local_time(state['updated'])}", class_="soft"),
        make("div", *shown, class_="numbers"),
    ]


def _add_curves(page: Page, curves: Curves) -> None:
    """Add a panel for each metric over steps, and for speed and usage over time."""
    lines, alone = curves.lines, [Group("", [curves])]
    zero = lines[0].get("time", 0)
    unit = "hours" if lines[-1].get("time", 0) - zero > UNITS["hours"] else "minutes"
    found = attempts(curves.run.folder / "attempts", MOST_ATTEMPTS)
    # A file of an earlier version has no time.
    starts = [(attempt.began, end) for _, attempt, end in found if 0 < attempt.began <= end]
    spans = [((began - zero) / UNITS[unit], (end - zero) / UNITS[unit]) for began, end in starts]
    stops = [
        max((line["step"] for line in lines if line.get("time", 0) <= end), default=0)
        for _, end in starts[:-1]
    ]
    text = [make("p", MARKS, class_="soft")] if stops else []
    page.add(f"{curves.name}: curves", make("h3", "Curves"), *text)
    over_time = {name for line in lines for name in line if OVER_TIME.fullmatch(name)}
    for title, metrics in choose([curves]).items():
        if not over_time & {*metrics}:
            page.add_panel(title, alone, metrics, stops=stops)
    for name in sorted(over_time):
        page.add_panel(name, alone, [name], unit, spans=spans)


def _add_figures(page: Page, folder: Path, name: str) -> None:
    """Add the newest picture of each name, the small ones first."""
    newest = {re.sub(r"-\d{8,}$", "", path.stem): path for path in sorted(folder.glob("*.png"))}
    if newest:
        page.add(f"{name}: figures", make("h3", "Figures"))
    for path in sorted(newest.values(), key=disk_usage):
        with suppress(OSError):
            if (png := read_bytes(path)).startswith(b"\x89PNG"):
                page.add_picture(f"{name}: {path.name}", png, short(path.stem, 100))
