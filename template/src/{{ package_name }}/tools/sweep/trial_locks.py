"""Decides which worker runs which trial, so that several jobs can work on one study.

The owner of a running trial is a user attribute of the trial. It only changes under a lock in the
study's folder, so that only one worker gets a trial.
"""

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages.journal import JournalFileOpenLock
from optuna.trial import FrozenTrial, Trial, TrialState

from ...engine.errors import UsageError
from ...engine.foreign import read_object
from ...engine.ranks.slurm_commands import jobs
from ...engine.run.status import KINDS

Owner = Mapping[str, Any]

SILENCE = 600  # seconds; if a trial writes nothing for longer, its worker has ended


class TrialLocks:
    """Assigns the trials of a study to this worker.

    Args:
        study: the study.
        folder: where the trials' run folders are.
    """

    def __init__(self, study: optuna.Study, folder: Path) -> None:
        self.study, self.folder = study, folder
        self.lock = JournalFileOpenLock(str(folder.absolute() / "claims"))
        self.me = {
            "job": os.environ.get("SLURM_JOB_ID"),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT", 0)),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def next(self, space: Mapping[str, BaseDistribution], wanted: int) -> Trial | None:
        """Return a trial whose worker has ended, or a new trial, or None if there are enough."""
        left = self._left_behind()
        with self._alone():
            trials = self.study.get_trials(deepcopy=False)
            for seen in left:
                trial = trials[seen.number]
                if trial.state != TrialState.RUNNING or _owner(trial) != _owner(seen):
                    continue  # another worker has taken it
                if trial.params.keys() == space.keys():
                    return self._take(Trial(self.study, trial._trial_id))
                # The trial has no settings yet, or those of another search space.
                self.study.tell(trial.number, state=TrialState.FAIL)
            if sum(trial.state != TrialState.WAITING for trial in trials) >= wanted:
                return None
            return self._take(self.study.ask(dict(space)))

    def release(self, trial: Trial) -> None:
        """Give a trial up, so that any worker can take it."""
        trial.set_user_attr("owner", None)

    def _take(self, trial: Trial) -> Trial:
        trial.set_user_attr("owner", self.me)
        return trial

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()

    def _left_behind(self) -> list[FrozenTrial]:
        """Return the running trials whose workers have ended, those of this job first."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        owners = [owner for trial in running if (owner := _owner(trial))]
        known = self._jobs({owner["job"] for owner in owners if owner["job"]})
        left = [trial for trial in running if self._is_gone(trial, known)]
        return sorted(left, key=lambda trial: (_owner(trial) or {}).get("job") != self.me["job"])

    def _is_gone(self, trial: FrozenTrial, known: set[str] | None) -> bool:
        owner = _owner(trial)
        if not owner:
            return True
        if owner["job"] and owner["job"] == self.me["job"]:
            # This job ran it before it was requeued.
            if owner["restart"] != self.me["restart"]:
                return True
        elif owner["job"] and known is not None:
            # A job that waits in the queue will continue its trial.
            return owner["job"] not in known
        if owner["host"] == self.me["host"]:
            return not _is_alive(owner["pid"])
        return _is_silent(trial, self.folder / run_name(trial.number))

    def _jobs(self, wanted: set[str]) -> set[str] | None:
        """Return the jobs that Slurm still knows, or None if it gives no reliable answer."""
        mine = str(self.me["job"] or "")
        if not mine or not wanted:
            return None
        # An answer without this job is not reliable.
        try:
            known = set(jobs([mine, *wanted]))
        except UsageError:
            return None
        return known if self.me["job"] in known else None


def run_name(number: int) -> str:
    """Return the name of a trial's run folder."""
    return f"trial-{number:04}"


def _owner(trial: FrozenTrial) -> Owner | None:
    return trial.user_attrs.get("owner")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_silent(trial: FrozenTrial, run_dir: Path) -> bool:
    """Return whether the trial's run has written nothing for longer than it announced."""
    try:
        status = read_object(run_dir / "status.json", KINDS)
        until = status["updated"] + max(status["expect_next_in"], SILENCE)
    except (OSError, ValueError, KeyError):
        started = trial.datetime_start
        until = (started.timestamp() if started else 0) + SILENCE
    return time.time() > until
