"""Errors that are shown as one line instead of a traceback, and functions that make text safe."""

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
"""Matches the error messages of a connection that the other side closed."""
SECRET = re.compile("(?i)key|token|passw|passphrase|_pass$|_pwd$|secret|credential|^notify_url$")
"""Matches the names of environment variables that hold secrets."""


class UsageError(Exception):
    """An error that the user can fix: wrong input, or something that the machine lacks.

    Its message is one line: what is wrong, what was expected, what to do.
    """


class LostRankError(UsageError):
    """Another rank has ended or does not answer; this rank has no error of its own."""

    EXIT_CODE = 76
    """EX_PROTOCOL: slurm/resume.sh may start the ranks again after this exit code"""


def is_rank_0() -> bool:
    """Return whether torchrun or srun made this process rank 0; True without a launcher."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def note_failure(error: str) -> None:
    """Tell the batch script that this rank failed and why, so that it does not requeue the job.

    The exit code of the launcher is not enough: it may be that of another rank, which the launcher
    killed. If several ranks fail, the file keeps the error of rank 0, or else the first one. A
    trial of a sweep writes no file, since the sweep continues.

    Ranks other than 0 then wait for the launcher to end them. So if all ranks have the same error,
    only rank 0 prints it.
    """
    if os.environ.get("FAILURE_FILE") and "SWEEP_TRIAL" not in os.environ:
        path, mode = Path(os.environ["FAILURE_FILE"]), "w" if is_rank_0() else "x"
        with suppress(OSError), path.open(mode, encoding="utf-8") as file:
            file.write(f"{printable(error)[:1000]}\n")  # the batch script searches the log for it
    if not is_rank_0():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        time.sleep(3)


def note_bad_nodes(nodes: Sequence[str]) -> None:
    """Tell the batch script which nodes the job should avoid when it starts again."""
    if os.environ.get("BAD_NODES_FILE"):
        with suppress(OSError), Path(os.environ["BAD_NODES_FILE"]).open("a") as file:
            file.write("".join(f"{node}\n" for node in nodes))


class PrintableFormatter(logging.Formatter):
    """Escapes control characters, since a log line may quote another user's file."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return a record as one line: a line break in it could imitate another log line."""
        record.message = printable(record.message)
        return super().formatMessage(record)

    def formatException(self, failure: Any) -> str:  # noqa: ANN401 - logging's own type
        """Return the lines of a traceback, with control characters escaped."""
        return printable_lines(super().formatException(failure))


def say(text: object, end: str = "\n") -> None:
    """Print text, which may quote another user's file or a server, with control characters escaped.

    Line breaks stay.
    """
    print(printable_lines(str(text)), end=end, flush=True)


def printable_lines(text: str) -> str:
    """Return a text with its line breaks, and with all other control characters escaped."""
    return "\n".join(map(printable, text.split("\n")))


def printable(text: str) -> str:
    """Return a text as one line: control characters, also line breaks, are escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def without_secrets(text: str) -> str:
    """Return a text in which secrets from the environment and logins in URLs are replaced."""
    hidden = {}
    for name, value in os.environ.items():
        secrets = re.findall(r"://[^/:@\s]*:(\S+)@", value)
        secrets += [value] if SECRET.search(name) else []
        for secret in secrets:
            if len(secret) >= 6:
                hidden |= dict.fromkeys(_spellings(secret), f"<{name}>")
    for spelling in sorted(hidden, key=len, reverse=True):
        text = text.replace(spelling, hidden[spelling])
    # Without the limit of 500, a long line with many URLs would take minutes.
    return re.sub(r"(?<=://)\S{1,500}@", "<login>@", text)


def _spellings(secret: str) -> Iterator[str]:
    """Yield the ways to write a secret: unchanged, escaped for a URL, and in base64."""
    for plain in (secret, unquote(secret)):
        yield from (plain, quote(plain), quote(plain, safe=""), quote_plus(plain))
        # The base64 text depends on how many bytes come before the secret, such as a user name.
        for before, first in enumerate((0, 2, 3)):
            content = bytes(before) + plain.encode()
            yield b64encode(content)[first : len(content) // 3 * 4].decode()
