"""`status.json`: how a run stands, kept up to date, so that one that died or hangs is noticed.

`python -m <package> runs` reads it.
"""

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
        step: where the training is.
    """

    WRITE_INTERVAL = 5  # seconds at least between two notes
    SILENCE_LIMIT = (
        600  # seconds at least before silence means trouble: start-up, a slow validation
    )

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.started = self.last = self.written = time.time()
        self.longest = 0.0
        self.state: dict[str, Any] = {
            "status": "running",
            "error": None,
            "step": step,
            "progress": 0.0,
            "started": self.started,
            "updated": self.started,
            "expect_next_in": self.SILENCE_LIMIT,
            "job": os.environ.get("SLURM_JOB_ID"),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "missed_by": [],
        }
        self._write()

    def update(self, step: int, progress: float) -> None:
        """Note that the run has come to a step."""
        now = time.time()
        self.longest, self.last = max(self.longest, now - self.last), now
        self.state |= {
            "step": step,
            "progress": round(progress, 4),
            "updated": now,
            "expect_next_in": round(max(self.SILENCE_LIMIT, 5 * self.longest)),
        }
        if now - self.written > self.WRITE_INTERVAL:
            self._write()

    def end(self, status: Status, error: str | None, step: int, missed: Sequence[str] = ()) -> None:
        """Note how and where the run ended, and which trackers did not get everything."""
        self.state |= {"status": status, "error": error, "step": step, "missed_by": list(missed)}
        self.state["updated"] = time.time()
        self._write()

    def _write(self) -> None:
        self.written = time.time()
        try:
            write_atomically(self.path, json.dumps(self.state, indent=2) + "\n")
        except OSError as error:
            log.warning("could not write %s: %s", self.path, error.strerror)
