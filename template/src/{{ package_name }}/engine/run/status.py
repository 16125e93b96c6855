"""`status.json`: the state of a run, kept up to date, so that `runs` sees one that hangs."""

import json
import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..filesystem import write_atomically

Status = Literal["finished", "failed", "preempted"]

log = logging.getLogger(__name__)

KINDS = {
    "status": str,
    "error": str | None,
    "step": int,
    "progress": float | int,
    "started": float | int,
    "updated": float | int,
    "expect_next_in": float | int,
    "job": str | None,
    "host": str,
    "pid": int,
    "missed_by": list,
    "best_metric": str,
    "best_direction": str,
    "best_score": float | None,
    "best_step": int,
}
"""The types of the values in status.json, for `read_object`."""


class StatusFile:
    """The state of a run in a file, written by rank 0.

    Args:
        path: the file.
        step: of the training.
    """

    WRITE_INTERVAL = 5  # seconds between two writes
    SILENCE_LIMIT = 600  # seconds before silence means trouble; start-up and validations take long

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.last, self.longest = path, time.time(), 0.0
        self.state: dict[str, Any] = {
            "status": "running",
            "error": None,
            "step": step,
            "progress": 0.0,
            "started": self.last,
            "expect_next_in": self.SILENCE_LIMIT,
            "job": os.environ.get("SLURM_JOB_ID"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "missed_by": [],
        }
        self._write()

    def update(self, step: int, progress: float) -> None:
        """Save the step and the progress, from 0 to 1; most calls only keep them in memory."""
        now = time.time()
        self.longest, self.last = max(self.longest, now - self.last), now
        limit = round(max(self.SILENCE_LIMIT, 5 * self.longest))
        self.state |= {"step": step, "progress": round(progress, 4), "expect_next_in": limit}
        if now - self.state["updated"] > self.WRITE_INTERVAL:
            self._write()

    def end(self, status: Status, error: str | None, step: int, missed: Sequence[str] = ()) -> None:
        """Save how and where the run ended, and the trackers that did not get everything."""
        self.state |= {"status": status, "error": error, "step": step, "missed_by": list(missed)}
        self._write()

    def _write(self) -> None:
        self.state["updated"] = time.time()
        try:
            write_atomically(self.path, json.dumps(self.state, indent=2) + "\n")
        except OSError as error:
            log.warning("could not write %s: %s", self.path, error.strerror)
