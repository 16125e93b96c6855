"""How runs stand, read from their folders: no server, no torch.

    python -m <package> runs [FOLDER...] [--fail]

A run whose process died or hangs can't say so itself: it is told by its silence, and by Slurm.
"""

import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..engine.config import read_flags
from ..engine.errors import UsageError, printable
from ..engine.filesystem import in_range, read_lines, read_object
from ..engine.ranks import slurm_commands as slurm
from ..engine.run.status import KINDS
from ..settings import Settings
from . import program

# What is in the folder of a run and in no other.
MARKS = ("status.json", "metrics.jsonl", "config.yaml")
TROUBLE = ("failed", "stuck", "lost")
# Slurm's words for a job that holds no nodes, or none that are up: it has yet to come (back).
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
# A run heard of this recently lives, whatever Slurm says: it may be the Slurm of another cluster.
LATELY = 30
TAIL = 64 * 1024  # bytes of metrics.jsonl in which the newest results are looked for


@dataclasses.dataclass(frozen=True)
class Flags:
    """Show how runs stand: one that failed, is stuck (silent for too long), or is lost (its job
    has left Slurm without a word). The newest come first."""

    folders: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER...")
    ] = ()
    """folders of runs, of experiments or of all experiments; else the run_root of the settings"""
    last: int | None = None
    """show only so many of the newest"""
    hours: float | None = None
    """show only those heard of in so many hours"""
    fail: bool = False
    """exit with code 1 if a run that is shown failed, is stuck or lost"""
    json: Path | None = None
    """file for the same, as JSON"""


@dataclasses.dataclass(frozen=True)
class Run:
    """How a run stands.

    Args:
        status: running, finished, failed or preempted, as the run says; stuck, lost or queued, as
            its silence and Slurm say; unknown if nobody says.
        progress: from 0 to 1; heard: when it last wrote something, in seconds since 1970.
        metric: name of the newest result, and its value.
        note: what else is to be known, such as the error.
    """

    folder: str
    status: str
    step: int | None
    progress: float | None
    heard: float
    metric: str | None
    value: float | None
    job: str | None
    note: str


def main(argv: Sequence[str]) -> int:
    """Print the runs, a line each; return 1 if that is asked for and one is in trouble, else 0.

    Raises:
        UsageError: a folder is not there, or the file for the results can't be written.
    """
    flags = read_flags(Flags, argv, program("runs"))
    folders = flags.folders or (Path(Settings.parse([], prog="runs").run_root),)
    now = time.time()
    since = now - 3600 * flags.hours if flags.hours is not None else 0
    runs = [run for run in survey(find_runs(folders), now) if run.heard >= since][: flags.last]
    print(table(runs, now) if runs else f"no runs in {', '.join(map(str, folders))}")
    if flags.json:
        try:
            text = json.dumps([dataclasses.asdict(run) for run in runs], indent=2)
            flags.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"can't write {flags.json}: {error.strerror}") from None
    return 1 if flags.fail and any(run.status in TROUBLE for run in runs) else 0


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the folders of runs: those given, and those one or two levels below the others.

    Raises:
        UsageError: a folder is not there.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"no folder {folder}: name that of a run, or one that holds runs")
    found = [path for folder in folders for path in _runs_in(folder, depth=2)]
    return list({path.resolve(): path for path in found}.values())


def _runs_in(folder: Path, depth: int) -> list[Path]:
    try:
        if any((folder / mark).exists() for mark in MARKS):
            return [folder]
        below = sorted(path for path in folder.iterdir() if path.is_dir()) if depth else []
    except PermissionError:  # another user's, under a root that many share
        return []
    return [path for each in below for path in _runs_in(each, depth - 1)]


def survey(folders: Sequence[Path], now: float) -> list[Run]:
    """Return how runs stand, the newest first; Slurm is asked for their jobs where it is."""
    states = {folder: _state(folder) for folder in folders}
    jobs = {str(state["job"]) for state in states.values() if _unfinished(state)}
    said = _ask_slurm(jobs) if jobs else None
    # Read again: a run that ended while Slurm was asked must not count as lost.
    states = {
        folder: _state(folder) if _unfinished(state) else state for folder, state in states.items()
    }
    runs = [_judged(folder, state, said, now) for folder, state in states.items()]
    return sorted(runs, key=lambda run: run.heard, reverse=True)


def _state(folder: Path) -> dict[str, Any]:
    """Return status.json; or what the folder tells of a run that has none."""
    written = [path.stat().st_mtime for name in MARKS if (path := folder / name).exists()]
    status = "finished" if (folder / "summary.json").exists() else "unknown"
    newest = max(written, default=0.0)
    state = {"status": status, "job": None, "updated": newest, "expect_next_in": math.inf}
    try:
        return state | read_object(folder / "status.json", KINDS)
    except FileNotFoundError:
        return state
    except OSError as error:
        return state | {"error": f"status.json can't be read: {error.strerror}"}
    except ValueError as error:
        return state | {"error": f"status.json is damaged: {error}"}


def _unfinished(state: Mapping[str, Any]) -> bool:
    return state["job"] is not None and state["status"] not in ("finished", "unknown")


def _ask_slurm(jobs: set[str]) -> dict[str, str] | None:
    """Return what squeue says of those jobs that it knows, None if it can't be asked."""
    if not shutil.which("squeue"):
        return None
    try:
        return slurm.jobs(jobs)
    except UsageError as error:
        print(f"squeue can't be asked: {printable(str(error))}", file=sys.stderr)
        return None


def _judged(
    folder: Path, state: Mapping[str, Any], jobs: Mapping[str, str] | None, now: float
) -> Run:
    """Return how a run stands, from what it, its silence and Slurm say."""
    status, job, heard = state["status"], state["job"], state["updated"]
    said = (jobs or {}).get(str(job), "")
    gone = jobs is not None and job is not None and not said
    note = " ".join((state.get("error") or "").split())
    silence = f"silent for {duration(now - heard)} on {state.get('host', 'its node')}"
    if said.startswith(WAITING) and status != "finished":
        status, note = "queued", f"Slurm: {said}" + (f"; before: {note}" if note else "")
    elif status == "running" and gone and now - heard > LATELY:
        status, note = "lost", f"{silence}; Slurm no longer knows the job"
    elif status == "running" and now > heard + state["expect_next_in"]:
        status, note = "stuck", silence + (f"; Slurm: {said}" if said else "")
    elif status == "preempted" and gone:
        note = f"not in the queue: to go on, submit again with --run-dir {folder}"
    try:
        lines = read_lines(folder / "metrics.jsonl", TAIL)
    except OSError as error:  # another user's, perhaps
        lines, note = [], note or f"metrics.jsonl can't be read: {error.strerror}"
    metric, value = _result(state, lines)
    return Run(
        folder=str(folder),
        status=status,
        step=state.get("step", lines[-1]["step"] if lines else None),
        progress=state.get("progress"),
        heard=heard,
        metric=metric,
        value=value,
        job=None if job is None else str(job),
        note=note,
    )


def _result(
    state: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> tuple[str | None, float | None]:
    """Return name and value of the best score so far; before the first one, of the newest loss."""
    if state.get("best_score") is not None:
        return state.get("best_metric"), state["best_score"]
    for line in reversed(lines):
        for name in sorted(line):
            if name.endswith("loss") and is_number(line[name]):
                return name, line[name]
    return None, None


def is_number(value: object) -> bool:
    """Return whether a value from a file is a finite number."""
    return isinstance(value, int | float) and in_range(value)


def table(runs: Sequence[Run], now: float) -> str:
    """Return the runs as aligned text."""
    rows = [("run", "status", "step", "done", "last heard", "result", "job", "")]
    for run in runs:
        rows.append(
            (
                run.folder,
                run.status,
                "" if run.step is None else str(run.step),
                "" if run.progress is None else f"{100 * run.progress:.0f} %",
                f"{duration(now - run.heard)} ago",
                "" if run.metric is None else f"{run.metric} {run.value:.4g}",
                run.job or "",
                run.note,
            )
        )
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    right = (2, 3)  # columns of numbers
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in shown
    )


def duration(seconds: float) -> str:
    """Return a time in the largest unit of which there are two or more."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
