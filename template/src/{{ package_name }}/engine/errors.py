"""Errors that are shown as one line instead of a traceback, and text that is safe to show."""

import logging
import os
import re
import signal
import time
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

LEFT = re.compile("closed|reset|Broken pipe")
"""Matches the messages of sockets whose other end was closed."""
SECRET = re.compile("(?i)key|token|passw|passphrase|_pass$|_pwd$|secret|credential|^notify_url$")
"""Matches the names of variables that hold secrets."""


class UsageError(Exception):
    """A mistake in how the project is used or in what the machine offers.

    Its message is one line: what is wrong, what was expected, what to do.
    """


class LostRankError(UsageError):
    """Another rank has ended or does not answer; this rank has no error of its own."""

    EXIT_CODE = 76
    """after which slurm/resume.sh may start the ranks again: EX_PROTOCOL"""


def is_rank_0() -> bool:
    """Return whether this is rank 0, as torchrun or srun says, or a process without a launcher."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def note_failure(error: str) -> None:
    """Tell the batch script that this rank failed and why, so that it does not requeue the job.

    Of several errors, rank 0's counts, else the first one. The launcher may return the exit code of
    another rank, which it killed. A trial of a sweep tells nothing, since the sweep continues.
    Other ranks than 0 then wait until the launcher ends them, so that rank 0 alone prints an error
    of all ranks.
    """
    if os.environ.get("FAILURE_FILE") and "SWEEP_TRIAL" not in os.environ:
        path, mode = Path(os.environ["FAILURE_FILE"]), "w" if is_rank_0() else "x"
        with suppress(OSError), path.open(mode, encoding="utf-8") as file:
            file.write(f"{printable(error)[:1000]}\n")  # bash looks for it in the log
    if not is_rank_0():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        time.sleep(3)


def note_bad_nodes(nodes: Sequence[str]) -> None:
    """Tell the batch script which nodes a later start of the job should not use."""
    if os.environ.get("BAD_NODES_FILE"):
        with suppress(OSError), Path(os.environ["BAD_NODES_FILE"]).open("a") as file:
            file.write("".join(f"{node}\n" for node in nodes))


class PrintableFormatter(logging.Formatter):
    """Escapes control characters: a log may quote another user's file."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return a record on one line: a line break in it could forge another line."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, failure: Any) -> str:  # noqa: ANN401 - as logging has it
        """Return the lines of a traceback."""
        return printable_lines(super().formatException(failure))


def say(text: object, end: str = "\n") -> None:
    """Print text with control characters escaped: it may quote another user's file or a server."""
    print(printable_lines(str(text)), end=end, flush=True)


def printable_lines(text: str) -> str:
    """Return a text of several lines, with all other control characters escaped."""
    return "\n".join(map(printable, text.split("\n")))


def printable(text: str) -> str:
    """Return a text on one line, with control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def without_secrets(text: str) -> str:
    """Return a text without the values of secret variables and without logins in addresses."""
    hidden = {}
    for name, value in os.environ.items():
        secrets = re.findall(r"://[^/:@\s]*:(\S+)@", value)
        secrets += [value] if SECRET.search(name) else []
        for secret in secrets:
            if len(secret) >= 6:
                hidden |= dict.fromkeys(_spellings(secret), f"<{name}>")
    for spelling in sorted(hidden, key=len, reverse=True):
        text = text.replace(spelling, hidden[spelling])
    # Without a limit, a long line of many addresses would take minutes.
    return re.sub(r"(?<=://)\S{1,500}@", "<login>@", text)


def _spellings(secret: str) -> Iterator[str]:
    """Yield the ways to write a secret: as it is, as part of an address, in base64."""
    for plain in (secret, unquote(secret)):
        yield from (plain, quote(plain), quote(plain, safe=""), quote_plus(plain))
        # Its base64 depends on how many bytes come before it, such as those of a user's name.
        for before, first in enumerate((0, 2, 3)):
            content = bytes(before) + plain.encode()
            yield b64encode(content)[first : len(content) // 3 * 4].decode()
