"""Runs Slurm's commands."""

import os
import re
import subprocess
from collections.abc import Iterable

from ..errors import UsageError

TIMEOUT = 60  # seconds; Slurm's controller may be busy
# Variables with which users filter and format what these commands print.
FILTERS = ("SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_", "SQUEUE_", "SLURM_TIME_FORMAT")


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm; the caller checks its exit code.

    Args:
        command: its words.
        env: environment variables to add.

    Raises:
        UsageError: the command is not installed, or does not answer.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(FILTERS)}
    if "SLURM_JOB_ID" in own:  # a job's own cluster is this one
        own.pop("SLURM_CLUSTERS", None)
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env={**own, **env},
            start_new_session=True,  # Ctrl-C must not end sbatch after it has submitted a job
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"{command[0]} does not run ({error}): use a machine with Slurm's commands, such as a "
            "login node, and try again if Slurm is busy"
        ) from None


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Return what sbatch wrote to stderr, on one line.

    The site's own submission filter may explain there why it refuses a job.
    """
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "; ".join(line for line in lines if not line.startswith("Try ")) or "(no output)"


def ask(*command: str, **env: str) -> str:
    """Run a command of Slurm, and return its output.

    Raises:
        UsageError: the command is not installed, does not answer, or fails.
    """
    done = run(*command, **env)
    if done.returncode:
        raise UsageError(f"{command[0]} failed: {' '.join(done.stderr.split()) or 'no output'}")
    return done.stdout


def jobs(ids: Iterable[str]) -> dict[str, str]:
    """Return the state and its reason, such as `PENDING (BeginTime)`, of each job by its id.

    Jobs that Slurm no longer knows are left out.

    Raises:
        UsageError: squeue is not installed, does not answer, or fails.
    """
    # squeue refuses a list that has anything but numbers.
    numbers = sorted(number for number in set(ids) if re.fullmatch("[0-9]+", number))
    if not numbers:
        return {}
    # For a task of a job array, %A is the id of the task's own job.
    done = run("squeue", "--noheader", "--format=%A %T (%r)", f"--jobs={','.join(numbers)}")
    # squeue fails if the list has only one job, and Slurm no longer knows it.
    if done.returncode and "Invalid job id" not in done.stderr:
        raise UsageError(f"squeue failed: {' '.join(done.stderr.split())}")
    return dict(line.strip().split(" ", 1) for line in done.stdout.splitlines() if line.strip())
