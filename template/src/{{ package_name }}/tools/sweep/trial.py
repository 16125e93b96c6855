"""Runs one trial: starts a training in a new process, and stops it early if needed."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine.errors import UsageError
from ...engine.ranks.signals import StopRequest


def run(
    command: Sequence[str], stop: StopRequest, unwanted: Callable[[], bool] = lambda: False
) -> tuple[int, bool]:
    """Run a training to its end; stop it after a signal, or when it is unwanted.

    It runs in a new session, so that it does not get Ctrl-C twice.

    Args:
        command: the launch command with all flags.
        stop: set by the signals of this process.
        unwanted: called twice a second; it returns whether the training should stop.

    Returns:
        The exit code, and whether the training was stopped because it was unwanted.
    """
    # SWEEP_TRIAL allows --run-dir in a job array: each trial has its own run folder.
    env = {**os.environ, "SWEEP_TRIAL": "1"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=env)
    # On SIGTERM, srun kills the ranks, and it does not pass on SIGINT. torchrun passes on SIGTERM.
    number = signal.SIGUSR2 if Path(command[0]).name == "srun" else signal.SIGTERM
    told = dropped = False
    while True:
        try:
            return process.wait(timeout=0.5), dropped
        except subprocess.TimeoutExpired:
            if told:
                continue
            dropped = stop.received is None and unwanted()
            if dropped or stop.received:
                process.send_signal(number)
                told = True


def check_launch(command: Sequence[str]) -> None:
    """Check that there is a launch command.

    Raises:
        UsageError: the command is empty.
    """
    if not command:
        raise UsageError("no launch command: end with '-- COMMAND', such as -- srun ... train")


def as_flags(params: Mapping[str, Any]) -> list[str]:
    """Return settings as flags of train."""
    words = []
    for name, value in params.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={value}")
    return words
