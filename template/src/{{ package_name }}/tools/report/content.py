"""Fills a page about runs: status, numbers, curves, settings, code, figures, log."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from statistics import fmean, stdev

from ...engine.foreign import files_in, in_range, read_bytes
from .. import optional
from ..facts import about
from ..survey import Run, disk_usage, results
from ..text import local_time, short
from .curves import Curves, Group, differing, group
from .page import RESERVE, Html, Page, facts, make
from .picture import MEANING, UNITS, choose, colours_of

usage = optional("plugins.usage.costs")
MOST_ROWS = 100
MOST_NUMBERS = 24
MOST_ATTEMPTS = 20  # upper limit of attempts whose starts are marked
MOST_DIFF = 100_000  # characters
LOG_LINES, LOG_WIDTH = 50, 400
OVER_TIME = re.compile(r"train/\w+_per_second|system/(gpu|cpu)_percent")
STOPS = "Dotted: the run was stopped, and continued later. "
SPANS = "Grey: an attempt at the run, from its start to what it wrote last."
FIRST, LAST = ("run", "status"), ("steps", "hours", "GPU-hours", "CPU-hours", "settings")
FACTS = ("settings", "command", "commit", "code", "attempts", "nodes", "versions", "files")


def page_of(runs: Sequence[Curves]) -> str:
    """Return the page about runs as HTML. At its top, it names the parts that had no room."""
    alone = len(runs) == 1
    page = Page(runs[0].name, _badge(runs[0].run)) if alone else Page(f"{len(runs)} runs")
    if not alone:
        groups = group([each for each in runs if each.lines])
        _add_table(page, runs, groups)
    for add in (_add_status, _add_curves, _add_text, _add_figures):  # most important first
        if add is _add_curves and not alone:
            _add_overview(page, groups)
        for number, each in enumerate(runs, 0 if alone else 1):
            add(page, each, number)
    return page.text()


def _add_table(page: Page, runs: Sequence[Curves], groups: Sequence[Group]) -> None:
    """Add a table with a row for each group of seeds, and one for each run with a link to it."""
    differ = differing(runs)
    rows = [_mean(each) for each in groups if len(each.runs) > 1]
    for number, each in enumerate(runs[:MOST_ROWS], 1):
        spent, state = usage and usage.total(each.run.folder), each.run.state
        settings = " ".join(f"{name}={short(each.settings.get(name))}" for name in differ)
        row = {
            "run": make("a", short(each.name, 100), href=f"#run-{number}"),
            "status": _badge(each.run),
            **{name: short(value) for name, value in _scores(each).items()},
            "steps": short(state.get("step", "")),
        }
        if spent:
            row["hours"] = f"{spent.wall_seconds / 3600:.3g}"
            kind, hours = ("GPU", spent.gpu_hours) if spent.gpus else ("CPU", spent.cpu_hours)
            row[f"{kind}-hours"] = f"{hours:.3g}"
        rows.append(row | {"settings": short(settings, 200)})
    scores = [name for row in rows for name in row if name not in (*FIRST, *LAST)]
    names = [*FIRST, *list(dict.fromkeys(scores))[:MOST_NUMBERS], *LAST]
    names = [name for name in names if any(row.get(name) for row in rows)]
    cells = ((make("td", row.get(name, ""), title=name) for name in names) for row in rows)
    head = make("tr", *(make("th", name) for name in names))
    table = make("table", head, *(make("tr", *each) for each in cells), class_="runs")
    page.add("table", make("div", table, class_="wide"))
    if len(runs) > MOST_ROWS:
        page.left_out.append(f"{len(runs) - MOST_ROWS} rows of the table")


def _mean(seeds: Group) -> dict[str, str]:
    """Return the row of a group: the mean and standard deviation of each score over the seeds."""
    row, found = {"run": f"{seeds.label}: mean ± deviation"}, [_scores(run) for run in seeds.runs]
    for name in found[0] | found[-1]:
        values = [each[name] for each in found if name in each]
        if len(values) > 1:
            some = f" ({len(values)} seeds)" if len(values) < len(found) else ""
            row[name] = f"{short(fmean(values))} ± {stdev(values):.2g}{some}"
    return row


def _add_overview(page: Page, groups: Sequence[Group]) -> None:
    """Add the curves of all runs together."""
    page.place = 0, 2
    labels = [
        make("span", make("i", style=f"background:{colour}"), short(each.label))
        for each, colour in zip(groups, colours_of(groups), strict=True)
    ]
    if any(len(each.runs) > 1 for each in groups):
        labels.append(make("small", MEANING))
    if groups:
        page.add("legend", make("h3", "Curves"), make("p", *labels, class_="legend"))
    for name, metrics in choose(run for each in groups for run in each.runs).items():
        page.add_panel(f"all: {name}", groups, metrics)


def _add_status(page: Page, curves: Curves, number: int) -> None:
    """Add status, numbers, costs, settings and origin of a run."""
    run, name, known = curves.run, curves.name, about(curves.run)
    if number:
        page.place = number, 0
        page.add(name, make("summary", f"{short(name, 200)} ", _badge(run)))
    notes = {"note": run.note, "warnings": "\n".join(known["warnings"])}
    notes |= dict(line.split(": ", 1) for line in known["usage"])
    page.place = number, 1
    page.add(name, *_status(curves), facts(notes))
    known["commit"] = [known["commit"][0] or "not in git"]
    page.place = number, 4
    lines = {each: "\n".join(known[each]) for each in FACTS}
    page.add(f"{name}: facts", make("h3", "Where it came from"), facts(lines))


def _add_text(page: Page, curves: Curves, number: int) -> None:
    """Add the end of the log, and the uncommitted changes."""
    page.place = number, 5
    with suppress(OSError):
        text = read_bytes(curves.run.folder / "log.txt", 2**16, last=True).decode(errors="replace")
        lines = [short(line, LOG_WIDTH) for line in text.splitlines()[-LOG_LINES:]]
        title = make("h3", "The end of the log")
        page.add(f"{curves.name}: log", title, make("pre", "\n".join(lines)))
    if diff := curves.diff[:MOST_DIFF].expandtabs():
        summary = make("summary", f"Uncommitted changes: {len(diff.splitlines())} lines of a diff")
        changes = make("details", summary, make("pre", diff))
        page.add(f"{curves.name}: uncommitted changes", changes)


def _badge(run: Run) -> Html:
    """Return the status as a badge."""
    return make("span", short(run.status, 24), class_=f"status {run.status}")


def _scores(curves: Curves) -> dict[str, float]:
    """Return the metrics of the test set and the best score."""
    metric = str(curves.run.state.get("best_metric")).removeprefix("validation/")
    found = results(curves.run.folder) | {f"best {metric}": curves.run.state.get("best_score")}
    numbers = {n: v for n, v in found.items() if isinstance(v, int | float) and in_range(v)}
    return {name.replace("_", " "): value for name, value in numbers.items()}


def _status(curves: Curves) -> list[Html]:
    """Return the status of a run, and its numbers."""
    run, state, numbers = curves.run, curves.run.state, dict[str, object](_scores(curves))
    if not any(name.startswith("test ") for name in numbers):  # not finished: the newest ones
        numbers |= {n: v for line in curves.lines for n, v in line.items() if "loss" in n}
    numbers["step"] = state.get("step")
    if state.get("best_score") is not None:
        numbers["step of the best"] = state.get("best_step")
    numbers["done"] = f"{state['progress']:.0%}" if "progress" in state else None
    shown = [
        make("div", make("b", short(value, 40)), make("small", short(name, 60)))
        for name, value in list(numbers.items())[:MOST_NUMBERS]
        if value is not None
    ]
    return [
        make("p", f"{run.folder}, last heard {local_time(state['updated'])}", class_="soft"),
        make("div", *shown, class_="numbers"),
    ]


def _add_curves(page: Page, curves: Curves, number: int) -> None:
    """Add a panel for each metric over steps, and for speed and usage over time.

    Time starts at the first attempt. Curves over time have a gap between attempts.
    """
    page.place = number, 2
    attempts = usage.read(curves.run.folder) if usage else {}
    lines, found = curves.lines, [*attempts.values()][-MOST_ATTEMPTS:]
    starts = [(each.began, each.until) for each in found if 0 < each.began <= each.until]
    over_time = {name for line in lines for name in line if OVER_TIME.fullmatch(name)}
    gaps = [{"time": began, **dict.fromkeys(over_time, math.nan)} for began, _ in starts]
    timed = sorted([*gaps, *(line for line in lines if "time" in line)], key=itemgetter("time"))
    zero = timed[0]["time"] if timed else 0
    lasted = max([line["time"] for line in timed] + [end for _, end in starts], default=0) - zero
    unit = next((x for x in ("hours", "minutes") if lasted > 2 * UNITS[x]), "seconds")
    spans = [((began - zero) / UNITS[unit], (end - zero) / UNITS[unit]) for began, end in starts]
    stops = [
        max((line["step"] for line in lines if line.get("time", 0) < began), default=0)
        for began, _ in starts[1:]
    ]
    if lines and page.room > RESERVE:
        text = (STOPS if stops else "") + (SPANS if spans and over_time else "")
        page.add(f"{curves.name}: curves", make("h3", "Curves"), make("p", text, class_="soft"))
    alone, by_time = [Group("", [curves])], [Group("", [curves._replace(lines=timed)])]
    for title, metrics in choose([curves]).items():
        if not over_time & {*metrics}:
            page.add_panel(f"{curves.name}: {title}", alone, metrics, stops=stops)
    for name in sorted(over_time):
        page.add_panel(f"{curves.name}: {name}", by_time, [name], unit, spans=spans)


def _add_figures(page: Page, curves: Curves, number: int) -> None:
    """Add the newest picture with each name, small pictures first."""
    newest, name, page.place = dict[str, Path](), curves.name, (number, 3)
    with suppress(OSError):
        pictures = [x for x in files_in(curves.run.folder / "figures") if x.suffix == ".png"]
        newest = {re.sub(r"-\d{8,}$", "", path.stem): path for path in pictures}
    if newest:
        page.add(f"{name}: figures", make("h3", "Figures"))
    for path in sorted(newest.values(), key=disk_usage):
        with suppress(OSError):
            if (png := read_bytes(path)).startswith(b"\x89PNG"):
                page.add_picture(f"{name}: {path.name}", png, short(path.stem, 100))
