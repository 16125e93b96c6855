"""Removes checkpoints of finished runs: `python -m <package> prune RUN_DIR... [--dry-run]`.

First, it checks the checkpoint that stays. Then it lets `latest` and `best` name this checkpoint.
Last, it removes the others. So a run always has a checkpoint that can be loaded, even if this is
interrupted.
"""

import dataclasses
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ..engine.checkpoint_files import Checkpoints, find
from ..engine.config import read_flags, read_yaml
from ..engine.errors import UsageError, printable
from ..engine.filesystem import remove, write_atomically
from ..engine.run.run_lock import RunLock, owner_of
from . import program
from .survey import Run, disk_usage, find_runs, survey

PART = re.compile(r"step-\d+\.(pt|sha256|shards)|.*\.tmp")  # .tmp: unfinished files


@dataclasses.dataclass(frozen=True)
class Flags:
    """Remove checkpoints of finished runs, except the best one and those of the setting keep_every.
    Runs that train, wait or may continue are not changed."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR...")]
    """folders of runs, of experiments or of all experiments"""
    keep: Literal["best", "last"] = "best"
    """which checkpoint to keep; if there is no best one, the last is kept"""
    older: str = "0d"
    """only runs that have written nothing for this many days or hours, such as 30d or 12h"""
    dry_run: bool = False
    """print what would be removed, and remove nothing"""


def main(argv: Sequence[str]) -> int:
    """Remove checkpoints and print a line for each run; return 1 if a removal failed, else 0.

    Raises:
        UsageError: a folder does not exist, or `--older` is not a time.
    """
    flags = read_flags(Flags, argv, program("prune"))
    if not (age := re.fullmatch(r"(\d{1,6})([dh])", flags.older)):
        raise UsageError(f"--older is {flags.older}: give days or hours, such as 30d or 12h")
    latest = time.time() - int(age[1]) * {"d": 86400, "h": 3600}[age[2]]
    # Leave out runs behind links, which may belong to another user.
    found = [run for run in find_runs([x.resolve() for x in flags.folders]) if run.resolve() == run]
    total, failed = 0, False
    for run in survey(found, time.time()):
        if run.state["updated"] <= latest:
            try:
                size, said = _prune(run, flags)
            except (UsageError, OSError) as error:
                size, said, failed = 0, f"left alone: {str(error).partition(';')[0]}", True
            total += size
            print(printable(f"{os.path.relpath(run.folder)}: {said}"), flush=True)
    print(f"{total / 2**20:.1f} MiB {'would be ' if flags.dry_run else ''}freed in all")
    return int(failed)


def _prune(run: Run, flags: Flags) -> tuple[int, str]:
    """Prune a run; return the number of freed bytes, and the text of its line."""
    if (owner := owner_of(run.folder)) or run.status != "finished":
        return 0, f"left alone: {owner or run.status}"
    kept = _kept(run.folder, flags.keep)
    parts = _removable(run.folder, kept)
    if not parts:
        return 0, "nothing to remove"
    if not all(os.access(each.parent, os.W_OK) for each in parts):
        raise UsageError("you may not write there")
    size, steps = sum(map(disk_usage, parts)), [str(int(path.stem[5:])) for path in kept]
    number = sum(each.suffix == ".pt" for each in parts)
    if not flags.dry_run:
        _remove(run, parts, kept)
    said = f"{'would remove' if flags.dry_run else 'removed'} {number} checkpoint(s)"
    return size, f"{said}, {size / 2**20:.1f} MiB; kept: step {', '.join(steps) or 'none'}"


def _remove(run: Run, parts: Sequence[Path], kept: Sequence[Path]) -> None:
    """Let `latest` and `best` name what stays, and remove the rest, under the run's lock."""
    checkpoints, lock = Checkpoints(run.folder / "checkpoints"), RunLock(run.folder)
    lock.acquire()
    mine = str(lock.path)
    try:
        if survey([run.folder], time.time())[0].state != run.state:
            raise UsageError("a training started there in the meantime")
        if kept:
            write_atomically(checkpoints.folder / "latest", kept[0].name)
        if checkpoints.best_name() not in [path.name for path in kept]:
            (checkpoints.folder / "best").unlink(missing_ok=True)
        for each in parts:
            remove(each)
    finally:
        lock.release()
        os.unlink(mine)  # the lock's file would count as an attempt of the run
    if left := [each for each in parts if os.path.lexists(each)]:
        raise UsageError(f"{len(left)} file(s) can't be removed, such as {left[0]}")


def _kept(run: Path, keep: str) -> list[Path]:
    """Return the checkpoints that stay, newest first. `find` has checked the one to load from."""
    folder, settings = run / "checkpoints", read_yaml(run / "config.yaml")
    if not Checkpoints(folder).steps():
        return []
    every = settings.get("keep_every") if isinstance(settings, dict) else 0
    lasting = Checkpoints(folder, keep_every=every if isinstance(every, int) else 0).lasting()
    kept = {*lasting, find(run, "latest" if keep == "last" else "best")}
    return sorted(kept, key=lambda path: int(path.stem[5:]), reverse=True)


def _removable(run: Path, kept: Sequence[Path]) -> list[Path]:
    """Return the files to remove, each checkpoint before its digests: none may lack its digests."""
    parts = []
    for folder in (run / "checkpoints", *sorted(run.glob("earlier-*/checkpoints"))):
        if folder.resolve() != folder:
            raise UsageError(f"{folder} is a link")
        for each in sorted(folder.iterdir()) if folder.is_dir() else ():
            stays = each.suffix != ".tmp" and each.with_suffix(".pt") in kept
            if PART.fullmatch(each.name) and not stays:
                parts.append(each)
    return parts
