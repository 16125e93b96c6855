"""Reads the metrics of runs, with the labels and positions that a figure needs."""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from ...engine.config import read_yaml
from ...engine.errors import UsageError, printable
from ...engine.filesystem import read_lines, read_object
from ..runs import find_runs, is_number

# Settings that have no effect on a curve.
IGNORED = {"config", "experiment", "resume", "run_dir", "run_root", "tags", "trackers"}
MAX_SETTINGS = 3  # in a label

X = Literal["step", "time", "epoch"]


@dataclasses.dataclass(frozen=True)
class Curves:
    """The metrics of a run.

    Args:
        name: the folder, relative to the one that holds all runs.
        settings: the effective ones, and the number of ranks as `ranks`; empty if not known.
        lines: of metrics.jsonl, in order of their steps.
    """

    name: str
    settings: Mapping[str, Any]
    lines: Sequence[Mapping[str, Any]]


def load(folders: Sequence[Path]) -> list[Curves]:
    """Return the metrics of the runs in some folders; name those without metrics on stderr.

    Raises:
        UsageError: a folder is not there, or no run has metrics.
    """
    runs = {}
    for folder in find_runs(folders):
        try:
            lines, reason = read_lines(folder / "metrics.jsonl"), "no line in"
        except OSError:
            lines, reason = [], "can't read"
        if lines:
            runs[folder.resolve()] = lines
        else:
            shown = printable(str(folder))
            print(f"{shown} is left out: {reason} its metrics.jsonl", file=sys.stderr)
    if not runs:
        where = f"in {', '.join(map(str, folders))}" if folders else "without a folder"
        raise UsageError(f"nothing to draw {where}: name folders of runs that have logged a step")
    root = os.path.commonpath([folder.parent for folder in runs])
    return [
        Curves(os.path.relpath(folder, root), read_settings(folder), lines)
        for folder, lines in runs.items()
    ]


def read_settings(folder: Path) -> dict[str, Any]:
    """Return a run's settings and its number of ranks, as far as its folder has them."""
    settings: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError, KeyError):
        settings.update(read_yaml(folder / "config.yaml"))
        settings["ranks"] = read_object(folder / "provenance.json", {})["world_size"]
    return settings


def labels(runs: Sequence[Curves]) -> list[str]:
    """Return the names of the runs, with the settings in which they differ if there are few."""
    known = [run.settings for run in runs if run.settings]
    names = dict.fromkeys(name for settings in known for name in settings if name not in IGNORED)
    differing = [name for name in names if any(s.get(name) != known[0].get(name) for s in known)]
    if not 0 < len(differing) <= MAX_SETTINGS:
        return [run.name for run in runs]
    shown = [", ".join(f"{name} {run.settings.get(name)}" for name in differing) for run in runs]
    return [f"{run.name} ({text})" for run, text in zip(runs, shown, strict=True)]


def positions(runs: Sequence[Curves], x: X) -> tuple[str, list[list[float]]]:
    """Return the unit of the x axis, and for each run the x of each of its lines.

    Raises:
        UsageError: a run has no times, or has not finished an epoch.
    """
    if x == "step":
        return "step", [[line["step"] for line in run.lines] for run in runs]
    if x == "epoch":
        return "epoch", [epochs(run) for run in runs]
    for run in runs:
        if not all(is_number(line.get("time")) for line in run.lines):
            raise UsageError(f"{run.name} has no times in its metrics.jsonl: use --x step")
    times = [[line["time"] - run.lines[0]["time"] for line in run.lines] for run in runs]
    longest = max(map(max, times))
    lengths = {"hours": 3600, "minutes": 60, "seconds": 1}
    unit = next((unit for unit in lengths if longest >= 2 * lengths[unit]), "seconds")
    return unit, [[time / lengths[unit] for time in each] for each in times]


def epochs(run: Curves) -> list[float]:
    """Return the epoch of each line, a fraction; all epochs of a run have as many steps.

    Raises:
        UsageError: no line ends an epoch.
    """
    ended = [line for line in run.lines if is_number(line.get("epoch"))]
    # The first line of the last epoch: validations within an epoch repeat its number.
    last = max(ended, key=lambda line: line["epoch"], default={"epoch": 0, "step": 0})
    if last["epoch"] <= 0 or last["step"] <= 0:
        raise UsageError(f"{run.name} has not come to the end of an epoch: use --x step")
    return [line["step"] * last["epoch"] / last["step"] for line in run.lines]
