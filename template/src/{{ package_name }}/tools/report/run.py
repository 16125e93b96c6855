"""The parts of the page that are about one run."""

import re
import struct
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.filesystem import in_range, read_bytes
from ...engine.run import usage
from ...engine.run.run_lock import Attempt, newest
from ...settings import Settings
from ..plot.curves import Curves, Group
from ..plot.panels import SECONDS, choose
from ..runs import Run, commit_of, duration, local_time, read
from .page import MOST_BYTES, Element, Marks, Page, facts, make, picture, short

MOST_NUMBERS = 24
MOST_ATTEMPTS = 20
MOST_DIFF = 100_000  # characters
MOST_PIXELS = 50_000_000  # more would fill the memory of who opens the page
LOG_LINES, LOG_WIDTH = 50, 400
OVER_TIME = re.compile(r"train/\w+_per_second|system/(gpu|cpu)_percent")
MARKS = "Dotted: the run was stopped, and went on later. Grey: a process was training."


class Span(NamedTuple):
    """An attempt at a run, from when it began to when it wrote last, in seconds since 1970."""

    began: float
    ended: float
    attempt: Attempt


def add_run(page: Page, curves: Curves, place: int) -> bool:
    """Add what is known of a run, the important first; return whether all but figures fit."""
    run, name, before = curves.run, curves.name, len(page.left_out)
    spans, known = _spans(run.folder / "attempts"), read(run.folder / "provenance.json")
    page.add((place, 0), name, *_status(curves, "h2" if place else "h1"))
    defaults = Settings().as_dict() | {n: curves.settings.get(n) for n in ("run_dir", "ranks")}
    given = {
        name: short(str(value) if isinstance(value, float) else value) or '""'
        for name, value in curves.settings.items()
        if value != defaults.get(name)
    }
    title = make("h3", "Settings that differ from the defaults")
    page.add((place, 3), f"{name}: settings", title, facts(given))
    title = make("h3", "Where it came from")
    page.add((place, 4), f"{name}: provenance", title, facts(_provenance(known, spans)))
    with suppress(OSError):
        text = read_bytes(run.folder / "log.txt", 2**16, last=True).decode(errors="replace")
        lines = [short(line, LOG_WIDTH) for line in text.splitlines()[-LOG_LINES:]]
        title = make("h3", "The end of the log")
        page.add((place, 6), f"{name}: log", title, make("pre", "\n".join(lines)))
    _add_curves(page, curves, spans, place)
    fits = len(page.left_out) == before
    _add_figures(page, run.folder / "figures", name, place)
    if diff := str(known.get("git", {}).get("diff") or "")[:MOST_DIFF]:
        summary = make("summary", f"Uncommitted changes: {len(diff.splitlines())} lines of a diff")
        changes = make("details", summary, make("pre", diff.expandtabs()))
        page.add((place, 5), f"{name}: uncommitted changes", changes)
    return fits


def status_of(run: Run) -> Element:
    """Return the status as a badge."""
    return make("span", short(run.status, 24), class_=f"status {run.status}")


def _status(curves: Curves, heading: str) -> list[Element]:
    """Return how a run stands: its status, numbers and cost."""
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
    heard = f"{curves.folder}, last heard {local_time(state['updated'])}"
    notes = (heard, run.note, *map(str, state.get("slow", [])))
    parts = [
        make(heading, f"{short(curves.name, 200)} ", status_of(run)),
        *(make("p", short(text, 1000), class_="soft") for text in notes if text),
        make("div", *shown, class_="numbers"),
    ]
    with suppress(ArithmeticError, ValueError):  # impossible numbers
        if spent := usage.total(run.folder):
            parts.append(facts(dict(line.split(": ", 1) for line in usage.lines(spent))))
    return parts


def _spans(folder: Path) -> list[Span]:
    """Return the newest attempts, in their order."""
    spans, last = [], newest(folder)
    for number in range(max(last - MOST_ATTEMPTS, 0) + 1, last + 1):
        path = folder / f"{number}.json"
        with suppress(OSError, TypeError):
            attempt, ended = Attempt(**read(path)), path.stat().st_mtime
            if 0 < attempt.began <= ended:  # a file of an earlier version has no time
                spans.append(Span(attempt.began, ended, attempt))
    return spans


def _add_curves(page: Page, curves: Curves, spans: Sequence[Span], place: int) -> None:
    """Add a panel for each metric over steps, and for speed and usage over time."""
    if not curves.lines:
        return
    times = [line["time"] for line in curves.lines if "time" in line] or [0]
    unit = "hours" if times[-1] - times[0] > SECONDS["hours"] else "minutes"
    at = [
        ((each.began - times[0]) / SECONDS[unit], (each.ended - times[0]) / SECONDS[unit])
        for each in spans
    ]
    steps = [
        [line["step"] for line in curves.lines if line.get("time", 0) <= each.ended]
        for each, _ in pairwise(spans)
    ]
    text = [make("p", MARKS, class_="soft")] if steps else []
    page.add((place, 1), f"{curves.name}: curves", make("h3", "Curves"), *text)
    over_time = {name for line in curves.lines for name in line if OVER_TIME.fullmatch(name)}
    panels = choose([curves])
    for name in over_time:
        panels = {title: members for title, members in panels.items() if name not in members}
    panels |= {name: [name] for name in sorted(over_time)}
    group = [Group("", [curves])]
    for number, (title, metrics) in enumerate(panels.items()):
        marks = Marks("step", [max(each) for each in steps if each])
        if over_time & {*metrics}:
            marks = Marks(unit, [end for _, end in at[:-1]], at)
        page.add_panel((place, 1, number), title, group, metrics, marks)


def _provenance(known: dict[str, Any], spans: Sequence[Span]) -> dict[str, object]:
    """Return where a run came from: its code, command, versions, machines and starts."""
    packages, template = known.get("packages", {}), known.get("template")
    python = known.get("python", {}).get("version")
    values = {
        "command": " ".join(map(str, known.get("command", [])[1:])),
        "commit": commit_of(known).replace("+", " with uncommitted changes"),
        "template": template.get("_commit") if isinstance(template, dict) else None,
        "versions": f"Python {python}, torch {packages.get('torch')}",
        "platform": known.get("platform"),
        "nodes": " ".join(map(str, known.get("hostnames", []))),
        "world size": f"{known.get('world_size')}, {known.get('launcher')}",
        "container": known.get("container"),
    }
    for number, each in enumerate(spans, 1):
        lasted = duration(each.ended - each.began)
        values[f"start {number}"] = f"{local_time(each.began)} for {lasted}, {each.attempt}"
    return values


def _add_figures(page: Page, folder: Path, name: str, place: int) -> None:
    """Add the newest picture of each name, the small ones first."""
    found = {re.sub(r"-\d{8,}$", "", path.stem): path for path in sorted(folder.glob("*.png"))}
    sizes = {}
    for path in found.values():
        with suppress(OSError):
            sizes[path] = path.stat().st_size
    title = [make("h3", "Figures")]
    for number, path in enumerate(sorted(sizes, key=sizes.__getitem__)):
        if sizes[path] > MOST_BYTES:
            page.left_out.append(short(f"{name}: {path.name}", 80))
            continue
        with suppress(OSError, struct.error):
            content = read_bytes(path)
            width, height = struct.unpack(">II", content[16:24])
            if content.startswith(b"\x89PNG") and width * height <= MOST_PIXELS:
                caption = make("figcaption", short(path.stem, 100))
                shown = make("figure", picture(content, "png", path.stem), caption)
                if page.add((place, 2, number), f"{name}: {path.name}", *title, shown):
                    title = []
