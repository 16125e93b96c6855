"""Finds run folders, and judges the status of runs.

If the process of a run died or hangs, the run can't write this itself. It is recognized because the
run writes nothing, and by Slurm's state of its job.
"""

import dataclasses
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..engine.config import read_yaml
from ..engine.errors import UsageError, printable
from ..engine.foreign import read_object
from ..engine.ranks import slurm_commands as slurm
from ..engine.run.status import KINDS
from ..settings import Settings
from .text import duration

# Files that only a run folder has.
MARKS = ("status.json", "metrics.jsonl", "config.yaml")
# How Slurm's states begin for a job that will start, or start again.
WAITING = ("PENDING", "CONFIGURING", "EXPEDITING", "REQUEUE", "SPECIAL_EXIT")
# Seconds. A run that wrote something within this time is alive, even if squeue does not know its
# job: the job may run on another cluster.
LATELY = 30
FACTS = {"command": list, "git": dict, "hostnames": list, "packages": dict, "python": dict}
# The flags that the batch scripts add.
BATCH_FLAGS = re.compile(r"--(device|world[-_]size|run[-_]dir)[ =]('[^']*'|\S+) ?")


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

    @property
    def facts(self) -> dict[str, Any]:
        """What status.json says, with the fields above in its place."""
        facts = {**self.state, **vars(self), "folder": str(self.folder)}
        return {name: value for name, value in facts.items() if name != "state"}


def recent(folders: Sequence[Path], hours: float, now: float) -> tuple[Sequence[Path], list[Run]]:
    """Return the folders, by default the run_root of the settings, and their runs, newest first.

    Args:
        folders: of runs, of experiments or of all experiments.
        hours: runs that wrote nothing in this time are left out.
        now: in seconds since 1970.

    Raises:
        UsageError: a folder does not exist.
    """
    folders = folders or (Path(Settings.parse([], prog="runs").run_root),)
    runs = survey(find_runs(folders), now)
    return folders, [run for run in runs if now - run.state["updated"] <= 3600 * hours]


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


def disk_usage(path: Path) -> int:
    """Return the bytes that a file, or a folder with its content, uses on the disk."""
    total = 0
    for each in (path, *(() if path.is_symlink() else path.rglob("*"))):
        with suppress(OSError):  # removed in the meantime
            facts = each.lstat()
            total += 512 * getattr(facts, "st_blocks", facts.st_size // 512)  # not on Windows
    return total
