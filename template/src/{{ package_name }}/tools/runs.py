"""Lists runs with their status: `python -m <package> runs [FOLDER...] [--fail]`.

`runs RUN_DIR` shows all about one run, and `runs RUN_DIR RUN_DIR` also how two runs differ.

It reads the files in the run folders. If the process of a run died or hangs, the run can't write
this itself. It is recognized because the run writes nothing, and by Slurm's state of its job.
"""

import dataclasses
import json
import math
import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tyro

from ..engine.config import read_flags, read_yaml
from ..engine.errors import UsageError, printable
from ..engine.filesystem import read_object
from ..engine.ranks import slurm_commands as slurm
from ..engine.run.status import KINDS
from ..settings import Settings
from . import costs, program
from .text import aligned, duration, local_time

# Files that only a run folder has.
MARKS = ("status.json", "metrics.jsonl", "config.yaml")
TROUBLE = ("failed", "stuck", "lost")
# How Slurm's states begin for a job that will start, or start again.
WAITING = ("PENDING", "CONFIGURING", "EXPEDITING", "REQUEUE", "SPECIAL_EXIT")
# Seconds. A run that wrote something within this time is alive, even if squeue does not know its
# job: the job may run on another cluster.
LATELY = 30
FACTS = {"command": list, "git": dict, "hostnames": list, "packages": dict, "python": dict}
# The flags that the batch scripts add.
BATCH_FLAGS = re.compile(r"--(device|world[-_]size|run[-_]dir)[ =]('[^']*'|\S+) ?")


@dataclasses.dataclass(frozen=True)
class Flags:
    """Show the status of runs, newest first. A run is stuck if it has written nothing for too long.
    It is lost if its job has left Slurm before the run wrote how it ended."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """folders of runs, of experiments or of all experiments; default: run_root of the settings.
    For one run folder, show all about the run; for two, show also how they differ"""
    hours: float = math.inf
    """show only runs that wrote something in the last HOURS hours"""
    fail: bool = False
    """exit with code 1 if one of the runs failed, is stuck or is lost"""
    usage: bool = False
    """show the costs of the runs instead: sums for each experiment, week and user"""
    json: Path | None = None
    """file to write with the status of the runs as JSON"""
    csv: Path | None = None
    """CSV file to write with a row for each run: status, costs, settings"""


@dataclasses.dataclass(frozen=True)
class Run:
    """The status of a run.

    Args:
        folder: the run folder.
        status: running, finished, failed or preempted, from status.json; stuck, lost, queued or
            restarting, if the time of the last change and Slurm say so; otherwise unknown.
        state: the content of status.json.
        note: the error, or the reason for the status.
        commit: commit of the newest start, with a + if there were uncommitted changes.
        flags: flags of the newest start, without those that the batch scripts add.
    """

    folder: Path
    status: str
    state: Mapping[str, Any]
    note: str
    commit: str
    flags: str


def main(argv: Sequence[str]) -> int:
    """Print a line for each run; return 1 if `--fail` is set and a run needs attention, else 0.

    Raises:
        UsageError: a folder does not exist.
    """
    flags = read_flags(Flags, argv, program("runs"))
    folders = flags.folders or (Path(Settings.parse([], prog="runs").run_root),)
    now = time.time()
    runs = survey(find_runs(folders), now)
    runs = [run for run in runs if now - run.state["updated"] <= 3600 * flags.hours]
    updated = {run.folder: run.state["updated"] for run in runs}
    spent = costs.attempts(updated) if flags.usage or flags.csv else []
    if not runs:
        print(f"no runs in {', '.join(map(str, folders))}")
    elif flags.usage:
        print("\n".join(aligned(costs.table(spent))))
    else:
        print("\n".join(_shown(folders, runs, now)))
    facts = [{**run.state, **vars(run), "folder": str(run.folder)} for run in runs]
    facts = [{name: each[name] for name in each if name != "state"} for each in facts]
    if flags.json:
        _write(flags.json, f"{json.dumps(facts, indent=2)}\n")
    if flags.csv:
        settings = [read_settings(run.folder) for run in runs]
        facts = [fact | results(run.folder) for fact, run in zip(facts, runs, strict=True)]
        _write(flags.csv, costs.as_csv(spent, facts, settings))
    return 1 if flags.fail and any(run.status in TROUBLE for run in runs) else 0


def _shown(folders: Sequence[Path], runs: Sequence[Run], now: float) -> list[str]:
    """Return all about the run whose folder is given, else a table, and how two runs differ."""
    from .facts import about, differences, screen

    if {folder.resolve() for folder in folders} != {run.folder.resolve() for run in runs}:
        return [table(runs, now)]
    if len(runs) == 1:
        return screen(about(runs[0]))
    return [table(runs, now), *(["", *differences(*folders)] if len(folders) == 2 else [])]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from None


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the run folders among these folders, and those one or two levels below the others.

    Raises:
        UsageError: a folder does not exist.
    """
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a folder: name a run folder, or a folder of runs")
    closed = list[Path]()
    found = [path for folder in folders for path in _runs_in(folder, 2, closed)]
    if closed:
        first, more = printable(str(closed[0])), len(closed) - 1
        said = f"left out, as it can't be read: {first}" + (f" and {more} more" if more else "")
        print(said, file=sys.stderr)
    return list({path.resolve(): path for path in found}.values())


def _runs_in(folder: Path, depth: int, closed: list[Path]) -> list[Path]:
    try:
        if any((folder / mark).exists() for mark in MARKS):
            return [folder]
        below = [path for path in folder.iterdir() if path.is_dir()] if depth else []
    except PermissionError:  # a folder of another user, in a shared run root
        closed.append(folder)
        return []
    below.sort(key=_natural)
    return [path for each in below for path in _runs_in(each, depth - 1, closed)]


def _natural(path: Path) -> list[int | str]:
    """Return a key that sorts run-2 before run-10."""
    parts = re.split(r"(\d+)", path.name)  # every second part is a number
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def survey(folders: Sequence[Path], now: float) -> list[Run]:
    """Return the status of runs, newest first; `now` is in seconds since 1970."""
    states = [_state(folder) for folder in folders]
    live = [state for state in states if state["status"] not in ("finished", "unknown")]
    ids = {str(job) for state in live for job in (state["job"], *state.get("chain", []))}
    jobs = None
    if shutil.which("squeue"):
        try:
            jobs = slurm.jobs(ids)
        except UsageError as error:
            print(f"squeue does not answer: {printable(str(error))}", file=sys.stderr)
    # Read the folders again: a run that ended in the meantime is not lost.
    runs = [_judge(folder, _state(folder), jobs, now) for folder in folders]
    return sorted(runs, key=lambda run: run.state["updated"], reverse=True)


def _state(folder: Path) -> dict[str, Any]:
    """Return the content of status.json, or the status "unknown" with the reason."""
    changed = folder.stat().st_mtime
    state = {"status": "unknown", "job": None, "updated": changed, "expect_next_in": 0}
    try:
        known = read_object(folder / "status.json", KINDS)
        return state | {name: known[name] for name in known.keys() & KINDS.keys()}
    except (OSError, ValueError) as error:
        return state | {"error": f"can't read status.json: {getattr(error, 'strerror', error)}"}


def _judge(
    folder: Path, state: Mapping[str, Any], jobs: Mapping[str, str] | None, now: float
) -> Run:
    """Return the status of a run from its files, its last change and the jobs that Slurm knows."""
    status, job, silent = state["status"], state["job"], now - state["updated"]
    said = (jobs or {}).get(job, "")
    gone = jobs is not None and job is not None and not said
    note = " ".join((state.get("error") or "").split())
    silence = f"silent for {duration(silent)} on {state.get('host', 'its node')}"
    stopped = status == "preempted" or state.get("lost_rank")
    later = [each for each in map(str, state.get("chain", [])) if each in (jobs or {})]
    if gone and later and status != "finished":
        status, note = "queued", f"job {later[0]} of the chain goes on"
    elif said.startswith(WAITING) and status != "finished":
        status, note = "queued", f"Slurm: {said}" + (f"; before: {note}" if note else "")
    elif status == "running" and gone and silent > LATELY:
        status, note = "lost", f"{silence}; Slurm no longer knows the job"
    elif status == "running" and silent > state["expect_next_in"]:
        status, note = "stuck", silence + (f"; Slurm: {said}" if said else "")
    elif stopped and said.startswith("RUNNING"):
        status = "restarting"
    elif stopped and gone:
        hint = f"not in the queue: to resume, submit again with --run-dir {folder}"
        note = f"{note}; {hint}" if note else hint
    facts = read(folder / "provenance.json")
    return Run(folder, status, state, note, commit_of(facts), _flags_of(facts))


def read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a run, such as provenance.json, or {} if unreadable."""
    with suppress(OSError, ValueError):
        return read_object(path, FACTS)
    return {}


def results(folder: Path) -> dict[str, Any]:
    """Return the metrics of the test set."""
    return {n: v for n, v in read(folder / "summary.json").items() if n.startswith("test_")}


def read_settings(folder: Path) -> dict[str, Any]:
    """Return a run's settings and its number of ranks, if its folder has them."""
    settings: dict[str, Any] = {}
    with suppress(UsageError, ValueError, TypeError, KeyError):
        settings.update(read_yaml(folder / "config.yaml"))
        settings["ranks"] = read(folder / "provenance.json")["world_size"]
    return settings


def commit_of(facts: Mapping[str, Any]) -> str:
    """Return the first 8 characters of the commit, with a + if there were uncommitted changes."""
    git = facts.get("git", {})
    return str(git.get("commit") or "")[:8] + ("+" if git.get("changes") else "")


def _flags_of(facts: Mapping[str, Any]) -> str:
    """Return the flags of the command line, without those that the batch scripts add."""
    return BATCH_FLAGS.sub("", shlex.join(map(str, facts.get("command", [])[2:])))


def table(runs: Sequence[Run], now: float) -> str:
    """Return the runs as text in columns. The flags and the note of a run are on separate lines."""
    header = "run", "status", "start", "step", "done", "last heard", "best score", "job", "commit"
    rows: list[tuple[str, ...]] = [header]
    for run in runs:
        state, score = run.state, run.state.get("best_score")
        metric = str(state.get("best_metric")).removeprefix("validation/")
        rows.append(
            (
                str(run.folder),
                run.status,
                local_time(state["started"]) if "started" in state else "",
                str(state.get("step", "")),
                f"{state['progress']:.0%}" if "progress" in state else "",
                f"{duration(now - state['updated'])} ago",
                "" if score is None else f"{metric} {score:.4g}",
                state["job"] or "",
                run.commit,
            )
        )
    lines = aligned(rows)
    for number, run in enumerate(runs, 1):
        notes = (run.flags, run.note, *map(str, run.state.get("slow", [])))
        lines[number] += "".join(f"\n    {printable(text)}" for text in notes if text)
    return "\n".join(lines)
