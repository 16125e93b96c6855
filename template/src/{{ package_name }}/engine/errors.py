"""The errors that are answered with one line instead of a traceback, and how lines are shown."""

import io
import logging
import os
import re
import signal
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

LEFT = re.compile("closed|reset|Broken pipe")
"""How sockets say that the process at the other end has left."""


class UsageError(Exception):
    """A mistake in how the project is used or in what the machine offers.

    Its message is one line: what is wrong, what was expected, what to do.
    """


class LostRankError(UsageError):
    """Another rank is gone or does not answer; this one has done nothing wrong."""


def wait_for_rank_0() -> None:
    """Give rank 0 the time to fail first, before another rank says why it fails.

    If rank 0 fails too, usually for the same reason, the launcher ends this rank meanwhile.
    """
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        time.sleep(3)


def note_failure() -> None:
    """Tell the batch script that this rank failed on its own, so that the job is not requeued.

    The launcher kills the ranks that still wait for this one, and then its exit code is theirs. A
    sweep goes on after a failed trial.
    """
    if "FAILURE_FILE" in os.environ and "SWEEP_TRIAL" not in os.environ:
        with suppress(OSError):
            Path(os.environ["FAILURE_FILE"]).touch()


@contextmanager
def bad_flags_said_once() -> Iterator[None]:
    """Hold back what is said of bad flags meanwhile, until rank 0 has had the time to say it."""
    held = io.StringIO()
    try:
        with redirect_stderr(held):
            yield
    except SystemExit as leaving:
        if leaving.code:
            wait_for_rank_0()
        raise
    finally:
        sys.stderr.write(held.getvalue())


class PrintableFormatter(logging.Formatter):
    """Spells out what a terminal would act on: a log may quote another user's file."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without its traceback."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, failure: Any) -> str:  # noqa: ANN401 - as logging has it
        """Return the traceback of a record."""
        return printable_lines(super().formatException(failure))


def say(text: object, end: str = "\n") -> None:
    """Print lines that may quote another user's file or a server."""
    print(printable_lines(str(text)), end=end, flush=True)


def printable_lines(text: str) -> str:
    """Return a text of lines with what else a terminal would act on spelled out."""
    return "\n".join(map(printable, text.split("\n")))


def printable(text: str) -> str:
    """Return a text on one line, with what a terminal would act on spelled out."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def without_secrets(text: str) -> str:
    """Return a text without the values of secret variables, and logins in addresses."""
    hidden = {}
    for name, value in os.environ.items():
        secrets = re.findall(r"://[^/:@\s]*:(\S+)@", value)
        secrets += [value] if re.search("KEY|TOKEN|PASSW|SECRET", name) else []
        for secret in secrets:
            if len(secret) >= 6:
                hidden |= dict.fromkeys(_spellings(secret), f"<{name}>")
    for spelling in sorted(hidden, key=len, reverse=True):
        text = text.replace(spelling, hidden[spelling])
    return re.sub(r"(?<=://)\S+@", "<login>@", text)


def _spellings(secret: str) -> Iterator[str]:
    """Yield how a secret may be written: as it is, as part of an address, in base64."""
    for plain in (secret, unquote(secret)):
        yield from (plain, quote(plain), quote(plain, safe=""), quote_plus(plain))
        # In base64 it depends on how many bytes stand before it, such as those of a user's name.
        for before, first in enumerate((0, 2, 3)):
            content = bytes(before) + plain.encode()
            yield b64encode(content)[first : len(content) // 3 * 4].decode()
