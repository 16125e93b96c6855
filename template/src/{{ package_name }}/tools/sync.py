"""Sends the trackers what they missed of runs: `python -m <package> sync RUN_DIR...`.

It sends metrics, the log and how the run ended, but no figures. Metrics that a tracker already has
are not sent again.
"""

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path

import tyro

from ..engine.config import read_flags
from ..engine.errors import UsageError
from ..engine.filesystem import write_atomically
from ..engine.foreign import read_object
from ..engine.run.run_lock import owner_of
from ..engine.run.status import KINDS
from ..settings import Settings
from ..trackers import load, select
from ..trackers.dispatch import known_ids, send
from . import program
from .survey import find_runs

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Send the trackers what they missed of runs. Run this on a machine that can reach them.

    Nothing is sent twice, so you can repeat this command.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs, or of experiments for all their runs"""
    trackers: tuple[str, ...] = ()
    """trackers to send to; default: the trackers that the run was started with"""


def main(argv: Sequence[str]) -> int:
    """Send what is missing; return 0, or 1 if a tracker failed or a run can't be read.

    Raises:
        UsageError: the folders have no run.
    """
    flags = read_flags(Flags, argv, program("sync"))
    folders = find_runs(flags.runs)
    if not folders:
        raise UsageError("there is no run to send: name a folder of runs, such as runs/demo/7")
    failures = 0
    for folder in folders:
        try:
            failures += len(sync(folder, flags.trackers))
        except (OSError, ValueError, UsageError) as error:
            log.error("can't send %s: %s", folder, getattr(error, "strerror", None) or error)
            failures += 1
    return int(failures > 0)


def sync(directory: Path, names: Sequence[str]) -> list[str]:
    """Send trackers what they lack of one run; return the trackers that failed.

    Without names, these are the trackers that the run was started with.

    Raises:
        OSError, ValueError, UsageError: a file of the run can't be read.
    """
    if owner_of(directory):
        log.warning("%s is training, and sends its data itself: sync it after its end", directory)
        return []
    settings = dataclasses.replace(
        Settings.from_yaml(directory / "config.yaml"), run_dir=str(directory.absolute())
    )
    state, ids = read_object(directory / "status.json", KINDS), known_ids(directory)
    status, missed = state.get("status", "running"), state.get("missed_by", [])
    if status == "running":
        log.warning("%s has not ended, or was killed: its data so far are sent", directory)
    chosen, sent, failed = [], [], []
    for name in select(names or settings.trackers):
        module = load(name)
        try:
            own = hasattr(module, "sync") and module.sync(directory)
        except (OSError, UsageError) as error:  # the other trackers may be reached
            log.error("can't send %s to %s: %s", directory, name, error)
            failed.append(name)
            continue
        if own:
            sent.append(name)
        elif status != "running" and name in ids and name not in missed:
            log.info("%s: %s has all data", directory, name)
        else:
            chosen.append(name)
    failed += send(chosen, settings)
    sent += [name for name in chosen if name not in failed]
    if any(name in missed for name in sent):
        state["missed_by"] = [name for name in missed if name not in sent]
        write_atomically(directory / "status.json", json.dumps(state, indent=2) + "\n")
    if not (names or settings.trackers) or "none" in settings.trackers:
        log.info("%s was started without trackers: choose some with --trackers", directory)
    if sent:
        log.info("%s: %s has all data now", directory, ", ".join(sent))
    return failed
