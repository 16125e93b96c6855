"""Writes files safely, although other processes or users may write at the same time."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO


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
