"""The status of runs, read from their folders: `python -m <package> runs [FOLDER...] [--fail]`.

A run whose process died or hangs can't write that itself. It is recognized by its silence, and by
what Slurm knows of its job.
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

# Files that only the folder of a run has.
MARKS = ("status.json", "metrics.jsonl", "config.yaml")
TROUBLE = ("failed", "stuck", "lost")
# Slurm's states of a job that will start, or start again.
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
# Seconds. A run that wrote this recently is alive even if squeue does not know its job: squeue may
# be another cluster's.
LATELY = 30
TAIL = 64 * 1024  # bytes of metrics.jsonl in which the newest results are looked for


@dataclasses.dataclass(frozen=True)
class Flags:
    """Show the status of runs, the newest first: a stuck run is silent for too long, and the job of
    a lost run has left Slurm before the run wrote its end."""

    folders: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER...")
    ] = ()
    """folders of runs, of experiments or of all experiments; else the run_root of the settings"""
    last: int | None = None
    """show only so many of the newest"""
    hours: float | None = None
    """show only runs that wrote something in the last so many hours"""
    fail: bool = False
    """exit with code 1 if a run that is shown failed, is stuck or lost"""
    json: Path | None = None
    """file for the results"""


@dataclasses.dataclass(frozen=True)
class Run:
    """The status of a run.

    Args:
        status: running, finished, failed or preempted, from status.json; stuck, lost or queued,
            from its silence and from Slurm; else unknown.
        progress: from 0 to 1.
        heard: when it last wrote something, in seconds since 1970.
        metric, value: of the best score, or of the newest loss.
        note: the error, or the reason for the status.
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
    """Print a line for each run; return 1 with `--fail` if one failed, is stuck or lost, else 0.

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
    """Return the status of runs, the newest first, from their folders and from Slurm.

    Args:
        folders: of the runs.
        now: seconds since 1970.
    """
    states = [_state(folder) for folder in folders]
    unfinished = [state for state in states if state["status"] not in ("finished", "unknown")]
    jobs = _ask_slurm({str(state["job"]) for state in unfinished if state["job"] is not None})
    # The folders are read again: a run that ended in the meantime is not lost.
    runs = [_judge(folder, _state(folder), jobs, now) for folder in folders]
    return sorted(runs, key=lambda run: run.heard, reverse=True)


def _state(folder: Path) -> dict[str, Any]:
    """Return status.json, or the same facts from other files of the folder."""
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


def _ask_slurm(jobs: set[str]) -> dict[str, str] | None:
    """Return the states of the jobs that squeue knows, by job; None if squeue can't be asked."""
    if not jobs or not shutil.which("squeue"):
        return None
    try:
        return slurm.jobs(jobs)
    except UsageError as error:
        print(f"squeue can't be asked: {printable(str(error))}", file=sys.stderr)
        return None


def _judge(
    folder: Path, state: Mapping[str, Any], jobs: Mapping[str, str] | None, now: float
) -> Run:
    """Return the status of a run, from its state, its silence and the jobs that Slurm knows."""
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
    except OSError as error:
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
    """Return name and value of the best score, or of the newest loss if there is no score yet."""
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
