"""Reads and writes files safely, although other processes or users may write at the same time."""

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

MOST_BYTES = 2**24  # allowed in a file that is read from a run folder
UNLINKED = ("attempts", "figures", "profile")  # folders of a run that must not be links


def write_atomically(path: Path, content: str | bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file completely or not at all: after an error, `path` is unchanged.

    Args:
        path: the file, which may exist.
        content: text, bytes, or a function that writes to the open file.
    """
    # The name is random. Otherwise another user could place a link of this name in a shared folder.
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

    Reading it again for the digest could give a wrong one, since a shared file system may show old
    content for a while.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self.file.write(content)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - of any type
        return getattr(self.file, name)


def open_regular(path: Path, mode: str = "rb", buffering: int = -1) -> IO[Any]:
    """Open a file in a run folder, which another user may have made.

    Raises:
        OSError: the file can't be opened; or it is a link, which may point to a secret of the
            caller; or a pipe, on which the caller would wait; or a hard link to another user's
            file; or its folder is one of UNLINKED and is a link.
    """

    def opener(name: str, flags: int) -> int:
        try:
            flags |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # not on Windows
            number = os.open(name, flags, 0o666)
        except OSError as error:
            known = {errno.ELOOP: "it is a link", errno.ENXIO: "it is not a regular file"}  # a pipe
            raise OSError(error.errno, known.get(error.errno or 0, error.strerror), name) from None
        facts = os.fstat(number)
        reason = "" if stat.S_ISREG(facts.st_mode) else "it is not a regular file"
        if facts.st_nlink > 1 and facts.st_uid != path.parent.stat().st_uid:
            reason = "it is a hard link to another user's file"
        if path.parent.name in UNLINKED and path.parent.is_symlink():
            reason = "its folder is a link"
        if reason:
            os.close(number)
            raise OSError(errno.EPERM, reason, name)
        if hasattr(os, "O_NONBLOCK"):  # on Lustre, non-blocking reads may fail
            os.set_blocking(number, True)
        return number

    return open(path, mode, buffering, None if "b" in mode else "utf-8", opener=opener)


def files_in(folder: Path) -> list[Path]:
    """Return the paths in a folder of a run, sorted by name.

    Raises:
        OSError: the folder can't be read, or is a link, which may point to private files.
    """
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(folder))
    return sorted(folder.iterdir())


def read_bytes(path: Path, most: int = MOST_BYTES, last: bool = False) -> bytes:
    """Return the content of a file in a run folder.

    Args:
        path: the file.
        most: the largest number of bytes to read.
        last: whether to return only the end of a longer file.

    Raises:
        OSError: the file can't be read, is not a regular file, or is longer than `most` without
            `last`.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most and not last:
            raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
        file.seek(max(size - most, 0))
        return file.read(most)


def sync_names(folder: Path) -> None:
    """Write a folder's list of files to the disk, so that new files survive a power failure."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        number = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def remove(path: Path) -> None:
    """Remove a folder with its content, a file or a link; ignore errors."""
    with suppress(OSError):
        path.unlink()  # fails for a folder
    shutil.rmtree(path, ignore_errors=True)


def disk_usage(path: Path) -> int:
    """Return the bytes that a file, or a folder with its content, uses on the disk."""
    total = 0
    for each in (path, *(() if path.is_symlink() else path.rglob("*"))):
        with suppress(OSError):  # removed in the meantime
            facts = each.lstat()
            total += 512 * getattr(facts, "st_blocks", facts.st_size // 512)  # not on Windows
    return total


def read_object(path: Path, kinds: Mapping[str, type | UnionType]) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        path: the file.
        kinds: the expected types by name. Names may be missing in the file.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not a JSON object, or a value has another type or is out of range.
    """
    try:
        values = json.loads(read_bytes(path))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"it is a {type(values).__name__}, not an object")
    for name in values.keys() & kinds.keys():
        if not isinstance(values[name], kinds[name]) or not in_range(values[name]):
            raise ValueError(f"{name} has a wrong type, or is out of range")
    return values


def in_range(value: object) -> bool:
    """Return whether a number is finite and fits a float; True for other values."""
    return not isinstance(value, int | float) or abs(value) < 1e300


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics.jsonl as dictionaries; an empty list if there is no file.

    Incomplete lines are left out. A line is incomplete while it is being written, or after the disk
    was full.
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
    """Return the path in a flag or setting with ~ and $VARIABLES expanded.

    Args:
        name: of the flag or setting, for error messages.
        path: its value.

    Raises:
        UsageError: a user or a variable does not exist.
    """
    full = os.path.expanduser(os.path.expandvars(path))
    if unknown := re.search(r"\$\{?\w+\}?|^~[^/]*", full):
        raise UsageError(
            f"{name} is {path}, but {unknown[0]} is unknown: set it, or change the path"
        )
    return full


def moved(values: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return settings in which paths that begin with the folder `old` begin with `new` instead.

    For example, `old` is "$STAGED" and `new` is the folder of this job's staged files.
    """
    inside = [k for k, v in values.items() if isinstance(v, str) and f"{v}/".startswith(f"{old}/")]
    return {**values, **{name: new + values[name][len(old) :] for name in inside}}


def check_archive(file: IO[bytes]) -> None:
    """Raise ValueError for a TorchScript program, or an archive that unpacks to more than its size.

    torch.save does not compress, so such an archive is meant to fill the memory.
    """
    if file.read(4) == b"PK\x03\x04":  # torch reads a file with these first bytes as an archive
        size = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(each.file_size for each in archive.infolist())
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise ValueError("it is a TorchScript program: save its state_dict with torch.save")
        if unpacked > size:
            raise ValueError(f"its {size} bytes unpack to {unpacked}")
    file.seek(0)
