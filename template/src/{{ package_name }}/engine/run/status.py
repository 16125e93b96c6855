"""`status.json`: the state of a run, kept up to date, so that `runs` sees one that hangs."""

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

SILENCE_LIMIT = 600  # seconds before silence means trouble; start-up and validations take long
WRITE_INTERVAL = 5  # seconds between two writes


@dataclass
class StatusFile:
    """The values in status.json; rank 0 writes them."""

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
    lost_rank: bool = False  # ended because another rank was lost, not by an error of its own
    chain: list = field(default_factory=lambda: os.environ.get("CHAIN_JOBS", "").split())
    slow: list = field(default_factory=list)  # ranks, as the log says it
    missed_by: list = field(default_factory=list)  # trackers that did not get everything

    def __post_init__(self) -> None:
        self.last_update = time.time()

    def update(self, folder: Path, position: Position, progress: float) -> None:
        """Note how far the run is; write the file, unless it was written some seconds ago."""
        now = time.time()
        silence, self.last_update = now - self.last_update, now
        self.expect_next_in = max(self.expect_next_in, round(5 * silence))
        self.step, self.progress = position.step, round(progress, 4)
        self.best_score, self.best_step = position.best_score, position.best_step
        if now - self.updated > WRITE_INTERVAL:
            self.write(folder)

    def write(self, folder: Path) -> None:
        """Write the file into the run folder; training goes on if it can't be written."""
        self.updated = time.time()
        try:
            write_atomically(folder / "status.json", json.dumps(asdict(self), indent=2) + "\n")
        except OSError as error:
            log.warning("could not write %s/status.json: %s", folder, error.strerror)


KINDS = get_type_hints(StatusFile)
"""The types of the values, for `read_object`."""
