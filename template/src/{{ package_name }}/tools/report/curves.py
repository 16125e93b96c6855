"""Reads the metrics of runs, groups runs that differ only in their seed, and names the groups."""

import hashlib
import os
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.errors import UsageError, printable
from ...engine.foreign import in_range, read_lines
from ..survey import Run, read, read_settings, survey
from ..text import short

# Settings that do not change a curve.
IGNORED = {"config", "experiment", "resume", "run_dir", "run_root", "tags", "trackers"}
IGNORED |= {"count_flops", "profile", "profile_ranks"}
MAX_SETTINGS = 3  # upper limit of settings in a label
LONGEST = 100  # upper limit of a label's characters


class Curves(NamedTuple):
    """The metrics of a run.

    Args:
        run: the run, with its folder (without links) and status.
        lines: the finite numbers of each line of metrics.jsonl, in the order of steps.
        settings: settings of the run that can be read, its number of ranks, its commit, and a name
            for its uncommitted changes.
        diff: the uncommitted changes.
    """

    run: Run
    lines: Sequence[Mapping[str, float]]
    settings: Mapping[str, Any]
    diff: str

    @property
    def name(self) -> str:
        """The last two folders of the path."""
        return "/".join(self.run.folder.parts[-2:])


class Group(NamedTuple):
    """A run, or several runs that differ only in their seed, with their label in a figure."""

    label: str
    runs: Sequence[Curves]


def drawable(runs: Sequence[Curves]) -> list[Curves]:
    """Return the runs that have metrics; print the others to stderr.

    Raises:
        UsageError: no run has metrics.
    """
    for run in runs:
        if not run.lines:
            said = f"{printable(str(run.run.folder))} is left out: it has no metrics"
            print(said, file=sys.stderr)
    if not any(run.lines for run in runs):
        raise UsageError("nothing to draw: name folders of runs that have logged a step")
    return [run for run in runs if run.lines]


def read_runs(folders: Sequence[Path]) -> list[Curves]:
    """Return the metrics and facts of runs, in the order of their folders, with absolute paths."""
    paths = [folder.resolve() for folder in folders]
    known = {run.folder: run for run in survey(paths, time.time())}
    return [_read(known[path]) for path in paths]


def _read(run: Run) -> Curves:
    lines: list[dict[str, float]] = []
    with suppress(OSError):
        for line in read_lines(run.folder / "metrics.jsonl"):
            known = {n: v for n, v in line.items() if isinstance(v, int | float) and in_range(v)}
            lines.append({printable(name): value for name, value in known.items()})
    git = read(run.folder / "provenance.json").get("git", {})
    diff = str(git.get("diff") or "")
    changes = hashlib.sha256(diff.encode(errors="replace")).hexdigest()[:6] if diff else "none"
    code = {"commit": run.commit or "none", "changes": changes}
    # Leave out integers with thousands of digits: Python can't convert them to text.
    settings = {n: v for n, v in read_settings(run.folder).items() if in_range(v)}
    return Curves(run, lines, settings | code, diff)


def group(runs: Sequence[Curves], together: bool = True) -> list[Group]:
    """Return the groups of runs, in the order of the runs.

    With `together`, runs with the same code and settings that differ only in their seed are a
    group. Runs with the same seed are repetitions, so each of them is a group of its own.
    """
    found: dict[Hashable, list[Curves]] = {}
    for run in runs:
        recipe = sorted(
            (n, repr(v)) for n, v in run.settings.items() if n not in IGNORED | {"seed"}
        )
        alike = together and "seed" in run.settings
        found.setdefault(tuple(recipe) if alike else run.run.folder, []).append(run)
    groups: list[list[Curves]] = []
    for members in found.values():
        seeds = {str(run.settings.get("seed")) for run in members}
        groups += [members] if len(seeds) == len(members) else [[run] for run in members]
    means = len(groups) < len(runs)
    shown = [n for n in differing([each[0] for each in groups]) if not means or n != "seed"]
    shown = shown if len(shown) <= MAX_SETTINGS else []
    labels = [_label(members, shown) for members in groups]
    for place, label in enumerate(labels):  # such as of groups that differ in many settings
        if number := labels[:place].count(label):
            labels[place] += f" ({number + 1})"
    return [Group(label, members) for label, members in zip(labels, groups, strict=True)]


def differing(runs: Sequence[Curves]) -> list[str]:
    """Return the settings in which runs differ, without those that do not change a curve."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in IGNORED)
    return [n for n in names if len({repr(run.settings.get(n)) for run in runs}) > 1]


def _label(members: Sequence[Curves], shown: Sequence[str]) -> str:
    """Return the label of a group: its name, some settings, and the seeds that did not finish."""
    name, settings, seeds = members[0].name, members[0].settings, ""
    if len(members) > 1:  # name the folder that contains all of them
        name = Path(os.path.commonpath([run.run.folder.parent for run in members])).name
        states = [f"; seed {run.settings['seed']} {run.run.status}" for run in members]
        unfinished = "".join(each for each in states if not each.endswith(" finished"))
        seeds = f" (mean of {len(members)} seeds{short(unfinished, LONGEST)})"
    label = " ".join([name, *(f"{each}={settings.get(each)}" for each in shown)])
    return printable(short(label, LONGEST) + seeds)
