"""What runs measured, made ready to be drawn: read, put in order, named."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from ...core.config import read_yaml
from ...core.errors import UsageError, printable
from ...core.filesystem import in_range, read_lines, read_object
from ..runs import find_runs

# Settings that do not change a curve.
ELSEWHERE = {"config", "experiment", "resume", "run_dir", "run_root", "tags", "trackers"}
FEW_SETTINGS = 3  # a legend has room for so many

X = Literal["step", "time", "epoch"]
Points = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Curves:
    """What a run measured.

    Args:
        name: tells it from the others; folder: the run's.
        settings: the effective ones, and the number of ranks as `ranks`; empty if not known.
        lines: of metrics.jsonl, by step.
    """

    name: str
    folder: Path
    settings: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]


def load(folders: Sequence[Path]) -> list[Curves]:
    """Return what the runs in some folders measured; say which have measured nothing yet.

    Raises:
        UsageError: there is no run, or none has measured anything.
    """
    runs = []
    for folder in find_runs(folders):
        try:
            lines, reason = in_order(read_lines(folder / "metrics.jsonl")), "no line in"
        except OSError:
            lines, reason = [], "can't read"
        if lines:
            runs.append((folder, lines))
        else:
            shown = printable(str(folder))
            print(f"{shown} is left out: {reason} its metrics.jsonl", file=sys.stderr)
    if not runs:
        where = f"in {', '.join(map(str, folders))}" if folders else "without a folder"
        raise UsageError(f"nothing to draw {where}: name folders of runs that have logged a step")
    names = short_names([folder for folder, _ in runs])
    return [
        Curves(name, folder, read_settings(folder), lines)
        for name, (folder, lines) in zip(names, runs, strict=True)
    ]


def in_order(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines without those that a later attempt, from an earlier checkpoint, replaced."""
    kept: list[dict[str, Any]] = []
    for line in lines:
        while kept and kept[-1]["step"] > line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of different paths that tell them apart."""
    paths = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-length:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def read_settings(folder: Path) -> dict[str, Any]:
    """Return a run's settings and its number of ranks, as far as its folder tells."""
    settings = {}
    try:
        settings.update(read_yaml(folder / "config.yaml"))
        settings["ranks"] = read_object(folder / "provenance.json", {})["world_size"]
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return settings


def labels(runs: Sequence[Curves]) -> list[str]:
    """Return the runs' names, with the settings that differ if they are few."""
    known = [run.settings for run in runs if run.settings]
    names = dict.fromkeys(name for settings in known for name in settings)
    differing = [
        name
        for name in names
        if name not in ELSEWHERE and any(s.get(name) != known[0].get(name) for s in known)
    ]
    if not 0 < len(differing) <= FEW_SETTINGS:
        return [run.name for run in runs]
    return [
        f"{run.name} ({', '.join(f'{name} {run.settings.get(name)}' for name in differing)})"
        if run.settings
        else run.name
        for run in runs
    ]


def positions(runs: Sequence[Curves], x: X) -> tuple[str, list[list[float]]]:
    """Return the unit of x, and for each run the position of each of its lines.

    Raises:
        UsageError: a run has no times, or no end of an epoch.
    """
    if x == "step":
        return "step", [[line["step"] for line in run.lines] for run in runs]
    if x == "epoch":
        return "epoch", [epochs(run) for run in runs]
    for run in runs:
        if not all(is_number(line.get("time")) for line in run.lines):
            raise UsageError(f"{run.folder} has no times in its metrics.jsonl: use --x step")
    times = [[line["time"] - run.lines[0]["time"] for line in run.lines] for run in runs]
    longest = max(max(each) for each in times)
    unit, length = next(
        (unit, length)
        for unit, length in (("hours", 3600), ("minutes", 60), ("seconds", 1))
        if longest >= 2 * length or length == 1
    )
    return unit, [[time / length for time in each] for each in times]


def epochs(run: Curves) -> list[float]:
    """Return the epoch of each line, a fraction between the lines that end one.

    Raises:
        UsageError: no line ends one.
    """
    ends = [(0, 0.0)]
    for line in run.lines:
        # Not where max_steps cut one short.
        if is_number(line.get("epoch")) and line["epoch"] > ends[-1][1]:
            ends.append((line["step"], line["epoch"]))
    if len(ends) == 1:
        raise UsageError(f"{run.folder} has not come to the end of an epoch: use --x step")
    found = []
    pieces = list(pairwise(ends))
    for line in run.lines:
        step = line["step"]
        # Behind the last end, on with the last one's pace.
        (s0, e0), (s1, e1) = next((p for p in pieces if step <= p[1][0]), pieces[-1])
        found.append(e0 + (e1 - e0) * (step - s0) / (s1 - s0))
    return found


def points(run: Curves, metric: str, xs: Sequence[float]) -> Points:
    """Return positions and values of a metric, without what is no finite number."""
    return [
        (x, line[metric])
        for x, line in zip(xs, run.lines, strict=True)
        if is_number(line.get(metric))
    ]


def is_number(value: object) -> bool:
    """Return whether a value that somebody wrote is a finite number that can be drawn."""
    return isinstance(value, int | float) and in_range(value)
