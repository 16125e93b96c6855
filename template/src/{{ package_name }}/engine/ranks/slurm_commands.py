"""Runs the commands of Slurm."""

import os
import re
import subprocess
from collections.abc import Iterable

from ..errors import UsageError

TIMEOUT = 60  # seconds: Slurm's controller may be busy


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm, with some variables; the caller checks its exit code.

    Raises:
        UsageError: the command is not installed, or does not answer.
    """
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            env={**os.environ, **env},
            start_new_session=True,  # Ctrl-C must not end an sbatch that has submitted a job
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"{command[0]} does not run ({error}): use a machine with Slurm's commands, such as a "
            "login node, and try again if Slurm is busy"
        ) from None


def said(done: subprocess.CompletedProcess[str]) -> str:
    """Return on one line what sbatch says on stderr: a site's own filter may say why it refuses."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return "; ".join(line for line in lines if not line.startswith("Try ")) or "(no output)"


def ask(*command: str, **env: str) -> str:
    """Return what a command of Slurm prints.

    Raises:
        UsageError: the command is not installed, does not answer, or fails.
    """
    done = run(*command, **env)
    if done.returncode:
        raise UsageError(f"{command[0]} failed: {' '.join(done.stderr.split()) or 'no output'}")
    return done.stdout


def jobs(ids: Iterable[str]) -> dict[str, str]:
    """Return state and reason, such as `PENDING (BeginTime)`, of each job that Slurm still knows.

    Raises:
        UsageError: squeue is not installed, does not answer, or fails.
    """
    # squeue refuses a list with anything but numbers.
    numbers = sorted(number for number in set(ids) if re.fullmatch("[0-9]+", number))
    if not numbers:
        return {}
    # %A is the id of the job itself, also for a task of a job array.
    done = run("squeue", "--noheader", "--format=%A %T (%r)", f"--jobs={','.join(numbers)}")
    # squeue fails if it is asked for a single job that Slurm no longer knows.
    if done.returncode and "Invalid job id" not in done.stderr:
        raise UsageError(f"squeue failed: {' '.join(done.stderr.split())}")
    return dict(line.strip().split(" ", 1) for line in done.stdout.splitlines() if line.strip())
