"""Slurm's commands, and what they answer."""

import re
import subprocess
from collections.abc import Iterable

from ..errors import UsageError

TIMEOUT = 60  # seconds for an answer: Slurm's controller may be busy


def run(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm's; its exit code is the caller's to judge.

    Raises:
        UsageError: it is not here, or does not answer.
    """
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{command[0]} did not answer within {TIMEOUT} s: try again") from None
    except OSError as error:
        raise UsageError(
            f"{command[0]} does not start ({error.strerror}): run this where Slurm's commands are, "
            "such as a login node"
        ) from None


def ask(*command: str) -> str:
    """Return what a command of Slurm's prints.

    Raises:
        UsageError: it is not here, does not answer, or fails; then with its own words.
    """
    done = run(*command)
    if done.returncode:
        raise UsageError(f"{command[0]} fails: {' '.join(done.stderr.split()) or 'without a word'}")
    return done.stdout


def jobs(ids: Iterable[str]) -> dict[str, str]:
    """Return state and reason, such as `PENDING (BeginTime)`, of those jobs that Slurm still has.

    Raises:
        UsageError: squeue is not here, does not answer, or fails.
    """
    # Of what else may stand in a file, squeue would refuse all.
    numbers = sorted(number for number in set(ids) if re.fullmatch("[0-9]+", number))
    if not numbers:
        return {}
    try:
        # %A is a job's own id, for a task of an array too.
        said = ask("squeue", "--noheader", "--format=%A %T (%r)", f"--jobs={','.join(numbers)}")
    except UsageError as error:
        # It fails where the only job that it is asked for has long left.
        if "Invalid job id" in str(error):
            return {}
        raise
    return dict(line.strip().split(" ", 1) for line in said.splitlines() if line.strip())
