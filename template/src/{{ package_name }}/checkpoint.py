"""Checkpoints: written whole or not at all, the newest good one found, the old ones removed.

A checkpoint is a file, `step-00000500.pt`. Where ranks have parts of the network, these lie in a
folder beside it, `step-00000500.shards`.
"""

import hashlib
import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError
from .files import sync_names, write_atomically
from .parts import cut_like, whole

log = logging.getLogger(__name__)

Place = tuple[Any, ...]  # the keys that lead to a value in nested dictionaries and lists

IN_SHARDS = "<in the shards>"  # stands in the file for a tensor of the folder


class Checkpoints:
    """The checkpoints of a run, in one folder.

    Two small files name one of them each: `latest`, and `best` by validation accuracy. All but
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
            self._named("latest") or "the beginning",
        )

    def newest(self) -> Path | None:
        """Return the newest checkpoint that can be read; say which can't."""
        # By name, not by `latest`: it may name a file that has been damaged since.
        found = sorted(self.folder.glob("step-*.pt"), reverse=True)
        for path in found:
            fault = find_fault(path)
            if not fault:
                return path
            log.warning("skipping the corrupt checkpoint %s: %s", path, fault)
        if found:
            log.warning("no checkpoint in %s can be read: starting from step 0", self.folder)
        return None

    def best(self) -> Path | None:
        """Return the best checkpoint by validation accuracy, None before the first validation."""
        name = self._named("best")
        return self.folder / name if name else None

    def latest(self) -> Path | None:
        """Return the checkpoint that was saved last, None before the first."""
        name = self._named("latest")
        return self.folder / name if name else None

    def _named(self, pointer: str) -> str | None:
        """Return the file name that `latest` or `best` holds."""
        path = self.folder / pointer
        return path.read_text(encoding="utf-8") if path.exists() else None

    def _prune(self, written: Path) -> None:
        kept = (self._named("best"), written.name)
        for path in sorted(self.folder.glob("step-*.pt"))[: -self.keep]:
            if path.name not in kept:
                path.unlink(missing_ok=True)
        for path in self.folder.glob("*.shards"):
            if not path.with_suffix(".pt").exists():
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob("*.tmp"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def shards_of(path: Path) -> Path:
    """Return the folder of a checkpoint's shards, which is there only if it has some."""
    return path.with_suffix(".shards")


def name_in_shards(place: Place) -> str:
    """Return the name of a tensor in the shards."""
    return "/".join(map(str, place))


def each_leaf(function: Callable[[Place, Any], Any], value: Any, place: Place = ()) -> Any:  # noqa: ANN401
    """Return nested dictionaries and lists with each value replaced by what a function returns."""
    if isinstance(value, dict):
        replaced = copy(value)  # with the versions that a network's state has beside its items
        for key, each in value.items():
            replaced[key] = each_leaf(function, each, (*place, key))
        return replaced
    if isinstance(value, list | tuple):
        return type(value)(each_leaf(function, x, (*place, i)) for i, x in enumerate(value))
    return function(place, value)


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, None if nothing.

    torch.load notices a short file, but not a changed byte; the archive's checksums do.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                return f"checksum of {damaged}"
            pickles = [name for name in archive.namelist() if name.endswith("data.pkl")]
            sharded = any(IN_SHARDS.encode() in archive.read(name) for name in pickles)
    except Exception as error:  # a changed byte can make zipfile raise anything
        return str(error) or type(error).__name__
    if not sharded:
        return None
    from . import shard_files

    return shard_files.find_fault(shards_of(path))


def find(resume: str, run_dir: Path) -> Path | None:
    """Return the checkpoint to start from, None to start anew.

    Args:
        resume: `auto`, `never`, or the path of a checkpoint or of a run folder. The run folder's
            own checkpoints go before a path: a requeued job goes on where it was.
        run_dir: this run's folder.

    Raises:
        UsageError: a path that holds no checkpoint, or `never` where the run folder has some.
    """
    own = Checkpoints(run_dir / "checkpoints").newest()
    if resume == "never":
        if own:
            raise UsageError(
                f"resume is never, but {run_dir} holds {own.name} of an earlier run: choose "
                "another --run-dir, or --resume auto"
            )
        return None
    if resume == "auto" or own:
        return own
    path = Path(resume)
    if path.is_dir():
        inner = path / "checkpoints"
        found = Checkpoints(inner if inner.is_dir() else path).newest()
    else:
        found = path if path.is_file() and not find_fault(path) else None
    if not found:
        raise UsageError(
            f"resume is '{resume}', which is no readable checkpoint: give a step-*.pt file, a run "
            "folder that has some, auto or never"
        )
    return found


def load(path: Path, like: Callable[..., Tensor | None] = lambda *_: None) -> dict[str, Any]:
    """Return a checkpoint's state: parts as this rank needs them, the rest on the CPU.

    Only tensors and plain values are read, so a file from elsewhere can't run code.

    Args:
        path: the checkpoint.
        like: returns for a place in the state the part that the tensor there is cut like; None, or
            what is no part, where it shall come whole.

    Raises:
        UsageError: it is not one of this project's checkpoints.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        sharded: dict[str, Tensor | None] = {}

        def look(place: Place, leaf: Any) -> None:  # noqa: ANN401
            if isinstance(leaf, str) and leaf == IN_SHARDS:
                sharded[name_in_shards(place)] = like(*place)

        def fill(place: Place, leaf: Any) -> Any:  # noqa: ANN401
            if isinstance(leaf, Tensor):
                return cut_like(leaf, like(*place))
            return parts.get(name_in_shards(place), leaf)

        each_leaf(look, state)
        parts = {}
        if sharded:
            from . import shard_files

            parts = shard_files.read(shards_of(path), sharded)
        state = each_leaf(fill, state)
    except Exception as error:  # nor is it said what torch.load raises for what is none
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(f"{path} is no checkpoint: {reason}") from None
    if isinstance(state, dict) and {"network", "optimizer", "samples_per_step"} <= set(state):
        raise UsageError(
            f"{path} was saved by an earlier version of this project: finish the run with that "
            "version, or start a new one from its weights with --init-from"
        )
    if not isinstance(state, dict) or not {"networks", "optimizers", "position"} <= set(state):
        raise UsageError(f"{path} is no checkpoint of this project: it was saved by something else")
    return state


def weights(source: Path) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """Return a file and the parameters of the networks in it, by the networks' names.

    Args:
        source: a run folder, whose best checkpoint is taken, else the newest; a checkpoint; or a
            file of the parameters of one network, as `torch.save(network.state_dict(), file)`
            writes it.

    Raises:
        UsageError: there is none, or it can't be read.
    """
    path = source
    if source.is_dir():
        checkpoints = Checkpoints(source / "checkpoints")
        path = checkpoints.best() or checkpoints.newest() or source
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # nor is it said what torch.load raises for what is none
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(f"{path} has no weights that can be read: {reason}") from None
    if isinstance(state, dict) and "position" in state:
        state = load(path)
        return path, state["averages"] or state["networks"]
    if isinstance(state, dict) and "samples_per_step" in state:  # of an earlier version
        state = state["network"]
    if isinstance(state, dict) and all(isinstance(each, Tensor) for each in state.values()):
        return path, {"network": state}
    raise UsageError(f"{path} has no weights: give a run folder, a checkpoint or a state_dict")


def parameters_sha256(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of tensors by name, the same wherever they are the same.

    Every rank must call this.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        # As bytes: NumPy does not know bf16.
        content = whole(tensor.detach()).cpu().reshape(-1)
        digest.update(content.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
