"""Writes a page about runs, to look at and to send: `python -m <package> report RUN_DIR...`.

It needs no server and no torch. run.py has the parts of a run, page.py the style of the page.
"""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from ...engine.config import read_flags
from ...engine.errors import UsageError
from ...engine.run import usage
from .. import program
from ..plot.curves import Curves, differing, group, read_runs
from ..plot.panels import MEANING, choose, colours_of
from ..runs import find_runs
from .page import Element, Marks, Page, make, short
from .run import add_run, status_of

MOST_ROWS = 100


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
    if len(runs) == 1:
        page = Page(runs[0].name)
        add_run(page, runs[0], 0)
        return page.text()
    page = Page(f"{len(runs)} runs")
    _add_overview(page, runs)
    for place, each in enumerate(runs, 1):
        if not add_run(page, each, place):
            page.left_out += [short(other.name, 80) for other in runs[place:]]
            break
    return page.text()


def _add_overview(page: Page, runs: Sequence[Curves]) -> None:
    """Add a table of the runs, and their curves together."""
    differ = differing(runs)
    rows = []
    for each in runs[:MOST_ROWS]:
        spent, state = usage.total(each.folder), each.run.state
        score = state.get("best_score")
        cells: dict[str, Element | str] = {
            "run": short(each.name, 100),
            "status": status_of(each.run),
            "best score": "" if score is None else f"{state.get('best_metric')} {short(score)}",
            "steps": short(state.get("step", "")),
            "hours": f"{spent.wall_seconds / 3600:.2f}" if spent else "",
            "GPU-hours": f"{spent.gpu_hours:.2f}" if spent else "",
            "settings that differ": short(
                " ".join(f"{name}={short(each.settings.get(name))}" for name in differ), 200
            ),
        }
        row = (make("td", cell, data_name=name) for name, cell in cells.items())
        rows.append(make("tr", *row))
    head = make("thead", make("tr", *(make("th", name) for name in cells)))
    table = make("table", head, make("tbody", *rows), class_="runs")
    page.add((0, 0), "table", make("h1", page.title), table)
    if len(runs) > MOST_ROWS:
        page.left_out.append(f"{len(runs) - MOST_ROWS} rows of the table")
    if groups := group([each for each in runs if each.lines]):
        labels = [
            make("span", make("i", style=f"background:{colour}"), short(each.label))
            for each, colour in zip(groups, colours_of(groups), strict=True)
        ]
        if any(len(each.runs) > 1 for each in groups):
            labels.append(make("small", MEANING))
        title = make("h3", "Curves")
        page.add((0, 1), "legend", title, make("p", *labels, class_="legend"))
        panels = choose(run for each in groups for run in each.runs)
        for number, (name, metrics) in enumerate(panels.items()):
            page.add_panel((0, 1, number), name, groups, metrics, Marks())
