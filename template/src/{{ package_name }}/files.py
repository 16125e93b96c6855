"""Files of a run: written whole or not at all, and read while another process writes them."""

import json
import os
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO


def write_atomically(path: Path, content: str | Callable[[BinaryIO], object]) -> None:
    """Write text, or what a function writes, so that `path` holds all of it or what it held.

    Raises:
        OSError: it could not be written (or what the function raises); nothing is left behind.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_names(path.parent)


def set_aside(paths: Sequence[Path], folder: Path) -> Path:
    """Move what is in a folder to a new one in it, `earlier-1` or the next number; return that."""
    place = next(path for number in count(1) if not (path := folder / f"earlier-{number}").exists())
    for path in paths:
        moved = place / path.relative_to(folder)
        moved.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, moved)
    return place


def sync_names(folder: Path) -> None:
    """Make the names in a folder outlive a power cut, as its files' content does."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        number = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def read_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Return the whole lines of a metrics.jsonl, or of its last bytes; none if it is not there.

    A line that is cut off, since it is being written or the disk was full, is left out.
    """
    lines = []
    if path.exists():
        with path.open("rb") as file:
            if last_bytes is not None:
                file.seek(max(path.stat().st_size - last_bytes, 0))
            text = file.read().decode(errors="replace")
        for line in text.splitlines():
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict) and isinstance(values.get("step"), int):
                lines.append(values)
    return lines
