"""Formats columns, values, times and durations as text, and writes text to files of the user."""

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from ..engine.errors import UsageError, printable, without_secrets


def aligned(rows: Sequence[Sequence[str]], widest: int | None = None) -> list[str]:
    """Return rows of cells as lines of text in columns, with control characters escaped."""
    cells = [[printable(cell)[:widest] for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def local_time(seconds: float, form: str = "%Y-%m-%d %H:%M") -> str:
    """Return seconds since 1970 as local date and time, or "" if there is no such time."""
    try:
        return time.strftime(form, time.localtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""


def duration(seconds: float) -> str:
    """Return a duration in seconds as text with days, hours, minutes and seconds."""
    return str(timedelta(seconds=round(min(max(seconds, 0), 1e12))))  # a file may have any number


def as_text(value: object) -> str:
    """Return a value as text. A float has six significant digits."""
    with suppress(ValueError):  # an integer of thousands of digits
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    return "?"


def short(value: object, most: int = 300) -> str:
    """Return a value as text without secrets. A long text is cut in its middle."""
    text = without_secrets(as_text(value))
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 2 :]}"


def write(path: Path, text: str) -> None:
    """Write a file that a flag names; raise UsageError if this fails."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}") from None
