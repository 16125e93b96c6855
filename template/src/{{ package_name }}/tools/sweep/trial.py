"""One trial: a training that is started as a process of its own, and watched."""

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
    """Run a training to its end; stop it once a signal has come or it is unwanted.

    It has a session of its own, so that it does not get Ctrl-C twice.

    Args:
        command: the launch command with all flags.
        stop: set by the signals of this process.
        unwanted: asked twice a second whether the training should stop.

    Returns:
        Its exit code, and whether it was stopped as unwanted.
    """
    # The tasks of an array must not share a run folder, but a trial has one of its own.
    env = {**os.environ, "SWEEP_TRIAL": "1"}
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, env=env)
    # srun would kill the ranks on TERM, and keeps INT to itself; torchrun passes TERM on.
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
        UsageError: there is none.
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
