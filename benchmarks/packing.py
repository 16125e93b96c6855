"""Seconds to the first step with packages on a slow shared disk, and packed for the node's disk."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from .compare import Comparison, in_turns
from .ranks import CONTESTANTS, Setting, copied, lines, project, train

RANKS = (1, 2, 4, 8)
SHARED = "read by each rank"


def measure(setting: Setting, repeats: int) -> Iterator[Comparison]:
    """Compare, for some numbers of ranks, `make pack` with an environment on the shared disk."""
    folder = copied(project())
    for target in ("setup", "pack"):
        subprocess.run(["make", target], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    for ranks in RANKS:
        notes: list[str] = []
        each = partial(first_step, replace(setting, ranks=ranks), folder, notes)
        yield Comparison(
            title=f"Start from a slow shared disk, ranks: {ranks}",
            unit="s",
            baseline=SHARED,
            figures=in_turns(
                {"packed": partial(each, packed=True), SHARED: partial(each, packed=False)}, repeats
            ),
            notes=notes,
        )


def first_step(setting: Setting, folder: Path, notes: list[str], packed: bool) -> float:
    """Return the seconds until rank 0 has logged a step, with those that unpacking takes."""
    with tempfile.TemporaryDirectory(dir=folder) as disk, mounted(folder, notes) as shared:
        began = time.time()
        if packed:
            # Read at full speed: the slow disk is served by a program, which real ones are not.
            tar = ("tar", "--extract", f"--file={folder / 'packages.tar'}", f"--directory={disk}")
            subprocess.run(tar, check=True)
            notes.append(f"Unpacked in {time.time() - began:.1f} s.")
        python = (Path(disk) if packed else shared) / ".venv/bin/python"
        flags = ("--max-steps=1", "--log-every=1", "--trackers=none")
        run_dir = train(setting, *flags, folder=folder, python=python)
        return next(line["time"] for line in lines(run_dir) if "train/loss" in line) - began


@contextmanager
def mounted(folder: Path, notes: list[str]) -> Iterator[Path]:
    """Yield where a folder is seen on a slow disk; note how many of its files were opened."""
    with tempfile.TemporaryDirectory() as mount:
        command = [sys.executable, str(CONTESTANTS / "slow_disk.py"), str(folder), mount]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                while not Path(mount).is_mount():
                    if server.poll() is not None:
                        raise RuntimeError(f"{' '.join(command)} ended with {server.returncode}")
                    time.sleep(0.02)
                yield Path(mount)
            finally:
                subprocess.run(["fusermount3", "-u", "-z", mount], check=False)
            notes.append(f"Opened: {server.communicate()[0].strip()} files.")
