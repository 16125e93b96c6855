"""Reads and writes files of a run, which another process or user may write at the same time."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import IO, Any, BinaryIO

from .errors import UsageError

MOST_BYTES = 2**24  # of a file in a run folder; more are refused
UNLINKED = ("attempts", "figures", "profile")  # folders of a run that are no links


def write_atomically(path: Path, content: str | bytes | Callable[[BinaryIO], object]) -> None:
    """Write text, bytes, or what a function writes. After an error, `path` is as it was before."""
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


class HashedFile:
    """A file whose content is hashed while it is written.

    A shared disk may show late what was written, so a digest of the file itself may be wrong.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self.file.write(content)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of any type
        return getattr(self.file, name)


def open_regular(path: Path, mode: str = "rb", buffering: int = -1) -> IO[Any]:
    """Open a file of a run folder, which another user may have made.

    Raises OSError for a link, which may point to a secret of the caller; for a pipe, since opening
    one waits for its other end; for a hard link to another user's file; and for what is in one of
    the folders UNLINKED, if that is a link.
    """

    def opener(name: str, flags: int) -> int:
        try:
            flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # not on Windows
            number = os.open(name, flags, 0o666)
        except OSError as error:
            known = {errno.ELOOP: "it is a link", errno.ENXIO: "it is no regular file"}  # a pipe
            raise OSError(error.errno, known.get(error.errno or 0, error.strerror), name) from None
        facts = os.fstat(number)
        reason = "" if stat.S_ISREG(facts.st_mode) else "it is no regular file"
        if facts.st_nlink > 1 and facts.st_uid != path.parent.stat().st_uid:
            reason = "it is a hard link to another user's file"
        if path.parent.name in UNLINKED and path.parent.is_symlink():
            reason = "its folder is a link"
        if reason:
            os.close(number)
            raise OSError(errno.EPERM, reason, name)
        if hasattr(os, "O_NONBLOCK"):  # on Lustre, reads in this mode may fail
            os.set_blocking(number, True)
        return number

    return open(path, mode, buffering, None if "b" in mode else "utf-8", opener=opener)


def files_in(folder: Path) -> list[Path]:
    """Return what is in a folder of a run, by name.

    Raises OSError if it can't be read or is a link, which may point to what others shall not see.
    """
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(folder))
    return sorted(folder.iterdir())


def read_bytes(path: Path, most: int = MOST_BYTES, last: bool = False) -> bytes:
    """Return the content of a file of a run folder, or with `last` at most its last bytes.

    Raises OSError if it can't be read, is no regular file, or is longer.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most and not last:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
        file.seek(max(size - most, 0))
        return file.read(most)


def sync_names(folder: Path) -> None:
    """Write the names in a folder to disk, so that they survive a power cut."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        number = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def remove(path: Path) -> None:
    """Remove a folder with its content, a file or a link, if it exists and can be removed."""
    with suppress(OSError):
        path.unlink()  # fails for a folder
    shutil.rmtree(path, ignore_errors=True)


def disk_usage(path: Path) -> int:
    """Return the bytes that a file, or a folder with its content, takes on the disk."""
    total = 0
    for each in (path, *(() if path.is_symlink() else path.rglob("*"))):
        with suppress(OSError):  # removed in the meantime
            facts = each.lstat()
            total += 512 * getattr(facts, "st_blocks", facts.st_size // 512)  # not on Windows
    return total


def read_object(path: Path, kinds: Mapping[str, type | UnionType]) -> dict[str, Any]:
    """Return the JSON object in a file. Any of the names in `kinds` may be missing.

    Raises ValueError if it is not an object, or if a value has another type or is out of range.
    """
    try:
        values = json.loads(read_bytes(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"it is no object but a {type(values).__name__}")
    for name in values.keys() & kinds.keys():
        if not isinstance(values[name], kinds[name]) or not in_range(values[name]):
            raise ValueError(f"{name} has another type, or is out of range")
    return values


def in_range(value: object) -> bool:
    """Return whether a value is no number or a finite one that fits a float."""
    return not isinstance(value, int | float) or abs(value) < 1e300


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl; none if there is no such file.

    Incomplete lines are left out: one that is being written, or was when the disk was full.
    """
    try:
        content = read_bytes(path, 2**30)
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
    """Return the path in a flag or setting with ~ and $VARIABLES expanded, which must exist."""
    full = os.path.expanduser(os.path.expandvars(path))
    if unknown := re.search(r"\$\{?\w+\}?|^~[^/]*", full):
        raise UsageError(f"{name} is {path}, but there is no {unknown[0]}: replace it, or set it")
    return full


def moved(values: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return settings, with another start of the paths in one folder, such as `$STAGED`."""
    inside = [k for k, v in values.items() if isinstance(v, str) and f"{v}/".startswith(f"{old}/")]
    return {**values, **{name: new + values[name][len(old) :] for name in inside}}


def check_archive(file: IO[bytes]) -> None:
    """Raise ValueError if an archive of torch unpacks to more than its own size."""
    if file.read(4) == b"PK\x03\x04":  # torch takes these bytes for an archive
        size = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(each.file_size for each in archive.infolist())
        if unpacked > size:
            raise ValueError(f"{unpacked} bytes in an archive of {size}")
    file.seek(0)
