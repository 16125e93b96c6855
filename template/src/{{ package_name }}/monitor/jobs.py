"""Slurm's queue."""

import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import UsageError

PAUSES = (2, 5, 15, 0)  # seconds between attempts: Slurm's controller may be too busy to answer


class Job(NamedTuple):
    """A line of squeue; `left` is the time that the job has, `reason` why it waits."""

    id: str
    state: str
    node: str
    left: str
    reason: str
    name: str


def queue() -> dict[str, Job]:
    """Return this user's jobs by id, those that are just ending among them.

    Raises:
        UsageError: Slurm does not answer, several times.
    """
    for pause in PAUSES:
        try:
            # The name goes last: it alone may hold a bar.
            lines = _ask("squeue", "--me", "--noheader", "--format=%i|%T|%N|%L|%r|%j").splitlines()
        except UsageError:
            if not pause:
                raise
            time.sleep(pause)
        else:
            break
    return {job.id: job for job in (Job(*line.split("|", 5)) for line in lines)}


def submit(options: Sequence[str], script: str, arguments: Sequence[str]) -> str:
    """Submit a batch script, and return the job's id.

    Raises:
        UsageError: Slurm refuses it; with its own words.
    """
    return _ask("sbatch", "--parsable", *options, script, *arguments).strip().partition(";")[0]


def cancel(job: str) -> None:
    """Cancel a job; Slurm passes over one that has ended."""
    _ask("scancel", job)


def _ask(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{command[0]} did not answer within 60 s: try again") from None
    except OSError as error:
        raise UsageError(
            f"{command[0]} does not start ({error.strerror}), and servers are Slurm jobs: run this "
            "on a login node"
        ) from None
    if done.returncode:
        raise UsageError(f"{command[0]} fails: {' '.join(done.stderr.split()) or 'without a word'}")
    return done.stdout
