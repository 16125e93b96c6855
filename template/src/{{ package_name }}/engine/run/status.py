"""`status.json`: the current state of a run, by which `runs` can also see whether it hangs."""

import json
import logging
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, get_type_hints

from ..filesystem import write_atomically
from ..position import Position

Status = Literal["finished", "failed", "preempted"]

log = logging.getLogger(__name__)

SILENCE_LIMIT = 600  # seconds; a start or a validation may take as long without an update
WRITE_INTERVAL = 5  # seconds between two writes


@dataclass
class StatusFile:
    """The values in status.json, which rank 0 writes.

    Args:
        best_metric, best_direction: the metric that decides the best checkpoint, "min" or "max".
        step: the number of steps so far.
        best_score, best_step: of the best validation so far; `best_score` may be None.
        status: "running", or how the run ended.
        error: the error that ended the run.
        progress: from 0 to 1.
        started, updated: the start of this attempt and the last update, in seconds since 1970.
        expect_next_in: without an update for this many seconds, the run may hang.
        job: the Slurm job id.
        restart: how often the batch script has started the ranks again in this job.
        host, pid: the process of rank 0.
        lost_rank: whether the run ended because another rank was lost.
        chain: the ids of the jobs in the chain of this job.
        warnings: what a person should know, such as the name of a slow node.
        missed_by: the trackers that did not get everything.
    """

    best_metric: str
    best_direction: str
    step: int
    best_score: float | None
    best_step: int
    status: str = "running"
    error: str | None = None
    progress: float | int = 0.0
    started: float | int = field(default_factory=time.time)
    updated: float | int = 0.0
    expect_next_in: float | int = SILENCE_LIMIT
    job: str | None = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID"))
    restart: int = field(default_factory=lambda: int(os.environ.get("RESTART_IN_JOB", 0)))
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    lost_rank: bool = False
    chain: list = field(default_factory=lambda: os.environ.get("CHAIN_JOBS", "").split())
    warnings: list = field(default_factory=list)
    missed_by: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.last_update = time.time()

    def update(self, folder: Path, position: Position, progress: float) -> None:
        """Note how far the run is, and write the file at most every WRITE_INTERVAL seconds."""
        now = time.time()
        silence, self.last_update = now - self.last_update, now
        self.expect_next_in = max(self.expect_next_in, round(5 * silence))
        self.step, self.progress = position.step, round(progress, 4)
        self.best_score, self.best_step = position.best_score, position.best_step
        if now - self.updated > WRITE_INTERVAL:
            self.write(folder)

    def write(self, folder: Path) -> None:
        """Write the file to the run folder; log a warning if this fails."""
        self.updated = time.time()
        try:
            write_atomically(folder / "status.json", json.dumps(asdict(self), indent=2) + "\n")
        except OSError as error:
            log.warning("could not write %s/status.json: %s", folder, error.strerror)


KINDS = get_type_hints(StatusFile)
"""The types of the values, for `read_object`."""
