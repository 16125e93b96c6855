"""Slurm's queue."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from ...engine.errors import UsageError
from ...engine.ranks.slurm_commands import ask

PAUSES = (2, 5, 15, 0)  # seconds between attempts: Slurm's controller may be busy


class Job(NamedTuple):
    """A line of squeue; `left` is the job's remaining time, `reason` is why it waits."""

    id: str
    state: str
    node: str
    left: str
    reason: str
    name: str


def queue() -> dict[str, Job]:
    """Return this user's jobs by id, including those that are about to end.

    Raises:
        UsageError: Slurm does not answer any attempt.
    """
    for pause in PAUSES:
        try:
            # The name comes last, since only it may contain a bar.
            queued = ask("squeue", "--me", "--noheader", "--format=%i|%T|%N|%L|%r|%j")
        except UsageError:
            if not pause:
                raise
            time.sleep(pause)
        else:
            break
    lines = [line for line in queued.splitlines() if "|" in line]  # not the name of a cluster
    return {job.id: job for job in (Job(*line.split("|", 5)) for line in lines)}


def submit(options: Sequence[str], script: str, arguments: Sequence[str]) -> str:
    """Submit a batch script, and return the job's id.

    Raises:
        UsageError: Slurm refuses it; the message is Slurm's.
    """
    return ask("sbatch", "--parsable", *options, script, *arguments).strip().partition(";")[0]


def cancel(job: str) -> None:
    """Cancel a job; does nothing if it has ended."""
    ask("scancel", job)
