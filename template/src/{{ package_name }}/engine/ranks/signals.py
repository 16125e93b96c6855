"""Signals that ask a run to stop.

The signal handler only notes the signal. Before the next step, the ranks tell each other about it
(step_totals.py). They then save a checkpoint (`stop` in training.py) and exit together.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

EXIT_CODE = 75
"""The exit code of a run that saved a checkpoint and stopped after a signal: EX_TEMPFAIL.

slurm/resume.sh requeues a job that exits with this code. __main__.py also uses it.
"""


class StopRequest:
    """Notes whether a signal has asked this rank to stop.

    Slurm sends USR2 before the time limit, since the batch scripts ask for it, and TERM at
    preemption. Other scripts use USR1. Ctrl-C sends INT; a second INT ends the process at once.

    Attributes:
        received: the name of the signal, None before it comes.
    """

    SIGNALS: ClassVar = tuple(
        getattr(signal, name)
        for name in ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT")
        if hasattr(signal, name)  # Windows has no USR1 and USR2
    )

    def __init__(self) -> None:
        self.received: str | None = None

    @classmethod
    def install(cls) -> "StopRequest":
        """Return a request that notes all signals of this process from now on."""
        request = cls()
        for number in cls.SIGNALS:
            signal.signal(number, request._note)
        return request

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.received = signal.Signals(number).name


@contextmanager
def default_signals() -> Iterator[None]:
    """Let signals end the process inside the context.

    While torch waits in C++ code, Python can't run its signal handlers.
    """
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in StopRequest.SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore stop signals: in a loading worker, whose rank handles them, and in a finished rank."""
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
