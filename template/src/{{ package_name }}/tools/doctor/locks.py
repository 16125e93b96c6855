"""Locks of files, which databases rely on: whether one node sees those of another."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from .findings import Finding

NAME = "locked"


def lock(file: IO) -> None:
    """Lock a file that is open for writing, until it is closed.

    Raises:
        OSError: another process has locked it, or files can't be locked here.
    """
    import fcntl  # not on Windows

    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Have a file in a folder locked, for the other nodes to try."""
    path, file = folder / NAME, None
    with suppress(OSError):  # the checks of the folder and of the trackers say so
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
        lock(file)
    try:
        yield
    finally:
        if file:
            file.close()


def seen(folder: Path, databases: Mapping[str, str]) -> Iterator[Finding]:
    """Try to lock the file that another node has locked.

    Args:
        folder: where it is.
        databases: trackers that need such locks, each with the variable that names a server.
    """
    try:
        with (folder / NAME).open("r+") as file:
            lock(file)
    except OSError:
        return
    yield Finding(
        "warning",
        "locks",
        f"{folder.parent}: this node can lock what another has locked, so jobs on two nodes can "
        f"damage the files of {' and '.join(databases)}: choose --run-root on another file system, "
        f"or name a server in {' and '.join(databases.values())}",
    )
