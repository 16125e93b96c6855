"""Reads and writes files of a run, which another process or user may write at the same time."""

import errno
import json
import os
import re
import secrets
import stat
import zipfile
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import UnionType
from typing import IO, Any, BinaryIO

from .errors import UsageError

MOST_BYTES = 2**24  # of a file in a run folder; more are refused
MOST_METRICS = 2**30  # of metrics.jsonl


def write_atomically(path: Path, content: str | bytes | Callable[[BinaryIO], object]) -> None:
    """Write text, bytes, or what a function writes. After a failure, `path` is as it was before.

    Raises:
        OSError: it could not be written. Errors of the function are raised, too.
    """
    # Nobody can guess the name: in a shared folder, another user could place a link there.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_names(path.parent)


def open_regular(path: Path, mode: str = "rb", buffering: int = -1) -> IO[Any]:
    """Open a file of a run folder, which another user may have made.

    A link may point to a secret of the caller, and opening a pipe waits for its other end.

    Raises:
        OSError: it can't be opened, is a link or a pipe, or a hard link to another user's file.
    """

    def opener(name: str, flags: int) -> int:
        without_waiting = getattr(os, "O_NONBLOCK", 0)
        try:
            flags |= getattr(os, "O_NOFOLLOW", 0) | without_waiting
            number = os.open(name, flags, 0o666)
        except OSError as error:
            known = {errno.ELOOP: "it is a link", errno.ENXIO: "it is no regular file"}  # a pipe
            reason = known.get(error.errno or 0, error.strerror)
            raise OSError(error.errno, reason, name) from None
        facts = os.fstat(number)
        reason = "" if stat.S_ISREG(facts.st_mode) else "it is no regular file"
        if facts.st_nlink > 1 and facts.st_uid != path.parent.stat().st_uid:
            reason = "it is a hard link to another user's file"
        if reason:
            os.close(number)
            raise OSError(errno.EPERM, reason, name)
        if without_waiting:  # on Lustre, reads in this mode may fail
            os.set_blocking(number, True)
        return number

    return open(path, mode, buffering, None if "b" in mode else "utf-8", opener=opener)


def read_bytes(path: Path, most: int = MOST_BYTES, last: bool = False) -> bytes:
    """Return the content of a file of a run folder.

    Args:
        path: the file, which another user may have written.
        most: how many bytes to read.
        last: whether to return the last bytes of a longer file.

    Raises:
        OSError: it can't be read, is no regular file, or is longer and `last` is false.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if last:
            file.seek(max(size - most, 0))
        elif size > most:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
        return file.read(most)


def set_aside(paths: Sequence[Path], folder: Path) -> Path:
    """Move files of a folder to its new subfolder `earlier-1`, or the next number; return that."""
    aside = next(path for number in count(1) if not (path := folder / f"earlier-{number}").exists())
    for path in paths:
        moved = aside / path.relative_to(folder)
        moved.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, moved)
    return aside


def sync_names(folder: Path) -> None:
    """Write the names in a folder to disk, so that they survive a power cut."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        number = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def read_object(path: Path, kinds: Mapping[str, type | UnionType]) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: the file.
        kinds: the types of values, by name; any of them may be missing.

    Raises:
        OSError: it can't be read.
        ValueError: it is not a JSON object, or a value has another type or is out of range.
    """
    try:
        values = json.loads(read_bytes(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"it is no object but a {type(values).__name__}")
    for name in values.keys() & kinds.keys():
        value = values[name]
        if not isinstance(value, kinds[name]):
            raise ValueError(f"{name} is a {type(value).__name__}")
        if not in_range(value):
            raise ValueError(f"{name} is out of range")
    return values


def in_range(value: object) -> bool:
    """Return whether a value is no number or a finite one that fits a float."""
    return not isinstance(value, int | float) or abs(value) < 1e300


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; none if there is no such file.

    Incomplete lines are left out: one that is being written, or was when the disk was full.

    Raises:
        OSError: it can't be read.
    """
    try:
        content = read_bytes(path, MOST_METRICS)
    except FileNotFoundError:
        return []
    lines = []
    for line in content.decode(errors="replace").splitlines():
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            continue
        step = values.get("step") if isinstance(values, dict) else None
        if isinstance(step, int) and in_range(step):
            lines.append(values)
    return lines


def full_path(name: str, path: str) -> str:
    """Return the path in a flag or setting with ~ and $VARIABLES expanded.

    Raises:
        UsageError: a variable is not set, or there is no such user.
    """
    full = os.path.expanduser(os.path.expandvars(path))
    if unset := re.search(r"\$\{?\w+\}?", full):
        raise UsageError(f"{name} is {path}, but {unset[0]} is not set: export it, or replace it")
    if full.startswith("~"):
        raise UsageError(f"{name} is {path}, but there is no such user: start with ~/ or ./")
    return full


def size_fault(archive: zipfile.ZipFile) -> str | None:
    """Return an error text if an archive unpacks to more than its own size, else None."""
    assert archive.fp
    size = archive.fp.seek(0, os.SEEK_END)
    unpacked = sum(each.file_size for each in archive.infolist())
    return f"{unpacked} bytes in an archive of {size}" if unpacked > size else None
