"""From a signal to a note that all ranks act on at the same step.

A handler only notes the signal. The ranks tell each other between steps (step_totals.py), save
(`_stop` in train.py) and leave together: saving inside a handler, or on one rank alone, hangs or
corrupts.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ClassVar

EXIT_CODE = 75
"""Exit code of a run that a signal stopped after a checkpoint: EX_TEMPFAIL, try again."""


class StopRequest:
    """Whether this rank was asked to stop.

    Slurm sends USR2 before the time limit (as our scripts ask) and TERM at preemption; USR1 is
    what other scripts use; INT is Ctrl-C. A second INT ends the process at once.
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
        """Return a request that the process's signals set from now on."""
        request = cls()
        for number in cls.SIGNALS:
            signal.signal(number, request._note)
        return request

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        self.received = signal.Signals(number).name


@contextmanager
def leave_at_signals() -> Iterator[None]:
    """Exit at a signal as if it killed: for a wait in C++, during which Python runs no handler."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        if number := reader.recv(1):
            name = signal.Signals(number[0]).name
            print(f"stopped by {name} before all ranks had met", file=sys.stderr, flush=True)
            os._exit(128 + number[0])

    thread = threading.Thread(target=watch, name="signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writer.fileno())
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()


def ignore_signals() -> None:
    """Ignore signals: in a loading worker, since the rank decides; in a rank that is done."""
    for number in StopRequest.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
