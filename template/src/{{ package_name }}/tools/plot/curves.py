"""Reads the metrics of runs, groups runs that differ only in their seed, and names the groups."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.errors import UsageError, printable
from ...engine.filesystem import in_range, read_lines
from ..runs import Run, find_runs, read, read_settings, survey

# Settings that have no effect on a curve.
IGNORED = {"config", "experiment", "resume", "run_dir", "run_root", "tags", "trackers"}
IGNORED |= {"profile", "profile_ranks"}
MAX_SETTINGS = 3  # in a label
LONGEST = 100  # characters of a label


class Curves(NamedTuple):
    """The metrics of a run.

    Args:
        run: its folder and status.
        lines: the finite numbers of each line of metrics.jsonl, in order of their steps.
        settings: of the run, with the number of ranks; empty if they can't be read.
        code: its commit, and what was not committed as a diff.
    """

    run: Run
    lines: Sequence[Mapping[str, float]]
    settings: Mapping[str, Any]
    code: tuple[str, str]

    @property
    def folder(self) -> Path:
        """The path of the run folder, without links."""
        return self.run.folder.resolve()

    @property
    def name(self) -> str:
        """The last two folders of the path."""
        return "/".join(self.folder.parts[-2:])


class Group(NamedTuple):
    """A run, or runs that differ only in their seed, and how they are called in a figure."""

    label: str
    runs: Sequence[Curves]


def load(folders: Sequence[Path]) -> list[Curves]:
    """Return the metrics of the runs in some folders; name those without metrics on stderr.

    Raises:
        UsageError: a folder is not there, or no run has metrics.
    """
    runs = read_runs(find_runs(folders))
    for run in runs:
        if not run.lines:
            said = f"{printable(str(run.run.folder))} is left out: it has no metrics"
            print(said, file=sys.stderr)
    if not any(run.lines for run in runs):
        raise UsageError("nothing to draw: name folders of runs that have logged a step")
    return [run for run in runs if run.lines]


def read_runs(folders: Sequence[Path]) -> list[Curves]:
    """Return what is known of runs, in the order of their folders."""
    known = {run.folder: run for run in survey(folders, time.time())}
    return [_read(known[folder]) for folder in folders]


def _read(run: Run) -> Curves:
    lines: list[dict[str, float]] = []
    with suppress(OSError):
        lines = [_numbers(line) for line in read_lines(run.folder / "metrics.jsonl")]
    git = read(run.folder / "provenance.json").get("git", {})
    code = str(git.get("commit")), str(git.get("diff"))
    return Curves(run, lines, read_settings(run.folder), code)


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
    numbers = {n: v for n, v in line.items() if isinstance(v, int | float) and in_range(v)}
    return {printable(name): value for name, value in numbers.items()}


def group(runs: Sequence[Curves], together: bool = True) -> list[Group]:
    """Return the runs in groups, in their order.

    With `together`, runs of the same code and settings that differ only in their seed are a group.
    Runs with equal seeds are a repetition and no sample of seeds: they are drawn on their own.
    """
    found: dict[str, list[Curves]] = {}
    for run in runs:
        recipe = {n: v for n, v in run.settings.items() if n not in IGNORED and n != "seed"}
        alike = together and "seed" in run.settings
        key = repr((sorted(recipe.items()), run.code)) if alike else str(run.folder)
        found.setdefault(key, []).append(run)
    groups: list[list[Curves]] = []
    for members in found.values():
        seeds = {str(run.settings.get("seed")) for run in members}
        groups += [members] if len(seeds) == len(members) else [[run] for run in members]
    shown = differing([members[0] for members in groups])
    if any(len(members) > 1 for members in groups):
        shown = [name for name in shown if name != "seed"]
    shown = shown if len(shown) <= MAX_SETTINGS else []
    several = len({members[0].code[0] for members in groups}) > 1
    return [Group(_label(members, shown, several), members) for members in groups]


def differing(runs: Sequence[Curves]) -> list[str]:
    """Return the settings in which runs differ, but for those that have no effect on a curve."""
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in IGNORED)
    return [n for n in names if len({repr(run.settings.get(n)) for run in runs}) > 1]


def _label(members: Sequence[Curves], shown: Sequence[str], commits: bool) -> str:
    """Return the name of a group with some settings, and its commit if there are several."""
    first = members[0]
    name = first.name
    if len(members) > 1:  # the folder that holds them all
        name = Path(os.path.commonpath([run.folder.parent for run in members])).name
        name += f" {first.code[0][:8]}" if commits else ""
    words = [name, *(f"{each}={first.settings.get(each)}" for each in shown)]
    label = printable(" ".join(words))
    if len(label) > LONGEST:
        label = f"{label[: LONGEST // 2]}…{label[-LONGEST // 2 :]}"
    if len(members) > 1:
        label += f" (mean of {len(members)} seeds"
        for run in members:
            if run.run.status != "finished":
                label += printable(f"; seed {run.settings['seed']} {run.run.status}")[:LONGEST]
        label += ")"
    return label
