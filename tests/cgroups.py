"""A group of processes whose memory the kernel limits, as Slurm limits that of a job."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def limited(size: int) -> Iterator[list[Path]]:
    """Make a cgroup with a limit of `size` bytes; skip the test if this machine can't.

    Yields its folders, to whose files `cgroup.procs` processes can be moved: that of memory first,
    that of CPU time last.
    """
    first = (CGROUPS / "memory").is_dir()  # the first version of cgroups
    roots = [CGROUPS / "memory", CGROUPS / "cpuacct"] if first else [CGROUPS]
    folders = [root / f"test-usage-{os.getpid()}" for root in roots]
    try:
        for folder in folders:
            folder.mkdir()
        set_limit(folders[0], str(size))
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield folders
    for folder in folders:
        while (folder / "cgroup.procs").read_text():  # Python's helpers end after their processes
            time.sleep(0.05)
        folder.rmdir()


def set_limit(folder: Path, size: str) -> None:
    """Change the limit of a cgroup's memory, to a size in bytes or such as 2G."""
    first = folder / "memory.limit_in_bytes"
    (first if first.exists() else folder / "memory.max").write_text(size)
