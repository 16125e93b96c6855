"""Reads the metrics of runs, and names the runs so that a figure can tell them apart."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.errors import UsageError, printable
from ...engine.filesystem import in_range, read_lines
from ..runs import find_runs, read_settings

# Settings that have no effect on a curve.
IGNORED = {"config", "experiment", "resume", "run_dir", "run_root", "tags", "trackers"}
MAX_SETTINGS = 3  # in a label


class Curves(NamedTuple):
    """The metrics of a run.

    Args:
        label: the name of the run, with settings.
        lines: the finite numbers of each line of metrics.jsonl, in order of their steps.
    """

    label: str
    lines: Sequence[Mapping[str, float]]


def load(folders: Sequence[Path]) -> list[Curves]:
    """Return the metrics of the runs in some folders; name those without metrics on stderr.

    Raises:
        UsageError: a folder is not there, or no run has metrics.
    """
    runs = {}
    for folder in find_runs(folders):
        with suppress(OSError):
            if lines := read_lines(folder / "metrics.jsonl"):
                runs[folder.resolve()] = [_numbers(line) for line in lines]
                continue
        print(f"{printable(str(folder))} is left out: it has no metrics", file=sys.stderr)
    if not runs:
        raise UsageError("nothing to draw: name folders of runs that have logged a step")
    return list(map(Curves, labels(list(runs)), runs.values()))


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    numbers = {n: v for n, v in line.items() if isinstance(v, int | float) and in_range(v)}
    return {printable(name): value for name, value in numbers.items()}


def labels(folders: Sequence[Path]) -> list[str]:
    """Return the names of runs, with the settings in which they differ if there are few."""
    runs = {folder: read_settings(folder) for folder in folders}
    first = runs[folders[0]]
    names = dict.fromkeys(name for settings in runs.values() for name in settings)
    differing = [n for n in names if any(s.get(n) != first.get(n) for s in runs.values())]
    shown = [name for name in differing if name not in IGNORED]
    shown = shown if len(shown) <= MAX_SETTINGS else []
    named = {
        folder: ["/".join(folder.parts[-2:]), *(f"{name}={settings.get(name)}" for name in shown)]
        for folder, settings in runs.items()
    }
    return [printable(" ".join(words)) for words in named.values()]
