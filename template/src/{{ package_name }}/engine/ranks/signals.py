"""Signals that ask a run to stop.

A handler only notes the signal. Before the next step, the ranks tell each other (step_totals.py),
save (`_stop` in train.py) and leave together.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

EXIT_CODE = 75
"""Exit code of a run that a signal stopped after a checkpoint: EX_TEMPFAIL, try again.

slurm/resume.sh requeues a job that exits with it, and __main__.py knows it.
"""


class StopRequest:
    """Whether this rank was asked to stop.

    Slurm sends USR2 before the time limit, as the batch scripts ask, and TERM at preemption. Other
    scripts use USR1. INT is Ctrl-C; a second INT ends the process at once.
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
        """Return a request that the signals of this process set from now on."""
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
    """Let signals end the process: during a wait in C++, Python runs no handler."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in StopRequest.SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore signals: in a loading worker, as its rank acts on them, and in a finished rank."""
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
