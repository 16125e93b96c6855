"""Checkpoints: written whole or not at all, the newest good one found, the old ones removed.

A checkpoint is a file, `step-00000500.pt`. Where ranks have parts of the network, these lie in a
folder beside it, `step-00000500.shards`.
"""

import errno
import hashlib
import logging
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import UsageError
from ..filesystem import archive_fault, open_regular, read_bytes, sync_names, write_atomically
from ..ranks.dtensor import full_tensor

log = logging.getLogger(__name__)

KeyPath = tuple[Any, ...]  # the keys that lead to a value in nested dictionaries and lists

IN_SHARDS = "<in the shards>"  # stands in the file for a tensor of the folder

WAITS = (0.1, 0.5, 2.0)  # seconds before trying again to read

T = TypeVar("T")


class Checkpoints:
    """The checkpoints of a run, in one folder.

    Two small files name one of them each: `latest`, and `best` by the metric of model.py. All but
    reading is for rank 0 alone.

    Args:
        folder: where they lie; made at the first save.
        keep: how many of the newest to keep, besides the best.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep

    def save(
        self, state: dict[str, Any], step: int, best: bool = False, shards: Path | None = None
    ) -> bool:
        """Write a checkpoint and point `latest` at it, and `best` if it is.

        Args:
            state: what to write, in nested dictionaries and lists.
            step, best: its step, and whether it is the best so far.
            shards: where its shards were written to, if it has some, which get their name here; a
                folder that is not there has it already.

        Returns:
            False if the disk did not take it; the ones before are then as they were.
        """
        path = self.path(step)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            sync_names(self.folder.parent)  # another rank may have made it, for its shards
            if shards and shards.exists():
                sync_names(shards)
                # A folder that is there was damaged, or it would have been resumed from.
                shutil.rmtree(shards_of(path), ignore_errors=True)
                os.replace(shards, shards_of(path))
            write_atomically(path, lambda file: torch.save(state, file))
            if not shards:
                shutil.rmtree(shards_of(path), ignore_errors=True)
            for name in ("latest", "best") if best else ("latest",):
                write_atomically(self.folder / name, path.name)
        # torch turns an OSError of the file it writes to into a RuntimeError.
        except (OSError, RuntimeError) as error:
            self.complain(path, error)
            return False
        self._prune(path)
        return True

    def path(self, step: int) -> Path:
        """Return the file of a step's checkpoint."""
        return self.folder / f"step-{step:08}.pt"

    def complain(self, path: Path, error: Exception) -> None:
        """Say that a checkpoint could not be written."""
        log.error(
            "could not write %s (%s); training goes on, and a resume would start from %s",
            path,
            str(error).splitlines()[0],
            getattr(self.latest(), "name", "the beginning"),
        )

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, the last one first.

        Raises:
            UsageError: the folder can't be read.
        """

        def names() -> list[str]:
            try:
                return os.listdir(self.folder)
            except (FileNotFoundError, NotADirectoryError):
                return []

        # By their names, not by `latest`: it may name a file that has been damaged since.
        steps = (step_of(name) for name in patiently(names, self.folder))
        return sorted((step for step in steps if step is not None), reverse=True)

    def undamaged(self) -> Iterator[Path]:
        """Yield the checkpoints whose checksums are right, the newest first; say which are damaged.

        Raises:
            UsageError: one can't be read, which is no damage.
        """
        tried: set[int] = set()
        # Listed again each time: another process may have removed some, and saved newer ones.
        while left := [step for step in self.steps() if step not in tried]:
            tried.add(left[0])
            path = self.path(left[0])
            fault = patiently(partial(find_fault, path), path)
            if not fault:
                yield path
            elif path.exists():
                log.warning("skipping the corrupt checkpoint %s: %s", path, fault)

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint, None if there is none."""
        return next(self.undamaged(), None)

    def best(self) -> Path | None:
        """Return the best checkpoint, None before the first validation."""
        return self._named("best")

    def latest(self) -> Path | None:
        """Return the checkpoint that was saved last, None before the first."""
        return self._named("latest")

    def _named(self, pointer: str) -> Path | None:
        """Return the checkpoint that `latest` or `best` names, None if it is not there.

        Raises:
            UsageError: its name can't be read.
        """
        path = self.folder / pointer

        def read() -> str:
            try:
                return read_bytes(path).decode(errors="replace")
            except (FileNotFoundError, NotADirectoryError):
                return ""

        name = patiently(read, path)
        named = self.folder / name
        return named if step_of(name) is not None and named.exists() else None

    def newer(self, step: int) -> list[Path]:
        """Return the files and folders of the checkpoints of later steps."""
        files = [self.path(each) for each in self.steps() if each > step]
        return [each for file in files for each in (file, shards_of(file)) if each.exists()]

    def _prune(self, written: Path) -> None:
        kept = (self.best(), written)
        for path in sorted(self.folder.glob("step-*.pt"))[: -self.keep]:
            if path not in kept:
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.shards"):
            if not path.with_suffix(".pt").exists():
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob("*.tmp"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint by its file's name, None if that is no checkpoint's."""
    found = re.fullmatch(r"step-([0-9]{8}|[1-9][0-9]{8,17})\.pt", name)
    return int(found[1]) if found else None


def shards_of(path: Path) -> Path:
    """Return the folder of a checkpoint's shards, which is there only if it has some."""
    return path.with_suffix(".shards")


def name_in_shards(key_path: KeyPath) -> str:
    """Return the name of a tensor in the shards."""
    return "/".join(map(str, key_path))


def each_leaf(function: Callable[[KeyPath, Any], Any], value: Any, key_path: KeyPath = ()) -> Any:  # noqa: ANN401
    """Return nested dictionaries and lists with each value replaced by what a function returns."""
    if isinstance(value, dict):
        replaced = copy(value)  # with the versions that a network's state has beside its items
        for key, each in value.items():
            replaced[key] = each_leaf(function, each, (*key_path, key))
        return replaced
    if isinstance(value, list | tuple):
        return type(value)(each_leaf(function, x, (*key_path, i)) for i, x in enumerate(value))
    return function(key_path, value)


def patiently(read: Callable[[], T], path: Path) -> T:
    """Return what a function reads; try again a little where the disk or the network fails.

    Raises:
        UsageError: it goes on failing. That is no damage: no run may start again for it.
    """
    for wait in WAITS:
        try:
            return read()
        except OSError as error:
            if not _is_failure(error):
                raise
            time.sleep(wait)
    try:
        return read()
    except OSError as error:
        raise UsageError(
            f"can't read {error.filename or path}: {error.strerror} (errno {error.errno}); nothing "
            "was changed: once it can be read, the same command goes on"
        ) from None


def _is_failure(error: Exception) -> bool:
    """Return whether the disk or the network failed; a damaged file can name invalid offsets."""
    return isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, None if nothing.

    torch.load notices a short file, but not a changed byte; the archive's checksums do.

    Raises:
        OSError: they can't be read.
    """
    fault = _look_for_fault(path)
    if fault and path.exists():
        read_through(path)
        fault = _look_for_fault(path)
    return fault


def read_through(path: Path) -> None:
    """Make sure that what zipfile or torch took for damage was no failure to read.

    Raises:
        OSError: it was one. Otherwise they may be asked once more.
    """
    with open_regular(path) as file:
        while file.read(2**20):
            pass


def _look_for_fault(path: Path) -> str | None:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            if fault := archive_fault(archive):
                return fault
            pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
            sharded = any(IN_SHARDS.encode() in archive.read(name) for name in pickles)
        if not sharded:
            return None
        from . import dcp

        return dcp.find_fault(shards_of(path))
    except Exception as error:  # a changed byte can make zipfile raise anything
        if _is_failure(error) and not isinstance(error, FileNotFoundError):
            raise
        return str(error) or type(error).__name__


def parameters_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of tensors by name, the same wherever they are the same.

    Every rank must call this.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        # As bytes: NumPy does not know bf16.
        content = full_tensor(tensor.detach()).cpu().reshape(-1)
        digest.update(content.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
