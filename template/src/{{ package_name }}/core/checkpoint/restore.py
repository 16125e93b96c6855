"""Which checkpoint a run goes on from, and how it is read."""

import logging
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..filesystem import open_regular, size_fault
from ..nested import count
from ..ranks.dtensor import distribute_like
from ..ranks.world import World
from .store import (
    IN_SHARDS,
    Checkpoints,
    KeyPath,
    each_leaf,
    find_fault,
    name_in_shards,
    patiently,
    read_through,
    shards_of,
    step_of,
)

log = logging.getLogger(__name__)

MOST_VALUES = 1_000_000  # of a checkpoint, one of many elements being a tensor


class UnreadableError(UsageError):
    """A checkpoint that is damaged, or a file that is none."""


def candidates(resume: str, run_dir: Path) -> Iterator[Path]:
    """Yield the checkpoints to start from, the best choice first; none to start from step 0.

    Args:
        resume: `auto`, `never`, or the path of a checkpoint or of a run folder. The run folder's
            own checkpoints go before a path: a requeued job goes on where it was.
        run_dir: this run's folder.

    Raises:
        UsageError: a path that holds no checkpoint, `never` where the run folder has some, or a
            file that can't be read.
    """
    own = Checkpoints(run_dir / "checkpoints")
    steps = own.steps()
    if resume == "never" and steps:
        raise UsageError(
            f"resume is never, but {run_dir} holds step {steps[0]} of an earlier run: choose "
            "another --run-dir, or --resume auto"
        )
    found = None
    for found in own.undamaged():
        yield found
    if resume in ("auto", "never"):
        if steps and not found:
            log.warning("no checkpoint in %s can be read: starting from step 0", own.folder)
        return
    path, found = Path(resume), None
    if patiently(path.is_dir, path):
        inner = path / "checkpoints"
        for found in Checkpoints(inner if inner.is_dir() else path).undamaged():
            yield found
    elif path.is_file() and not patiently(partial(find_fault, path), path):
        found = path
        yield found
    if not found:
        raise UsageError(
            f"resume is '{resume}', which is no readable checkpoint: give a step-*.pt file, a run "
            "folder that has some, auto or never"
        )


def load_first(
    paths: Iterator[Path], like: Callable[..., Tensor | None], world: World
) -> tuple[Path, dict[str, Any]] | None:
    """Return the first checkpoint that every rank can load, and its state; every rank calls this.

    Args:
        paths: rank 0's decide; None where there are none.
        like: as `load` takes it.

    Raises:
        UsageError: on every rank, where there are some, but none can be loaded: their checksums
            are right, so they are not to be replaced.
    """
    refused = None
    while path := world.on_main(lambda: next(paths, None)):
        state, error = {}, None
        try:
            state = load(path, like)
        except UsageError as caught:
            error = caught
        errors = [each for each in world.gather(error) if each]
        if not errors:
            return path, state
        for each in errors:
            if not isinstance(each, UnreadableError):
                raise each
        if world.is_main:
            log.warning("skipping a checkpoint that can't be loaded: %s", errors[0])
        refused = refused or errors[0]
    if refused:
        raise refused
    return None


def load(path: Path, like: Callable[..., Tensor | None] = lambda *_: None) -> dict[str, Any]:
    """Return a checkpoint's state: parts as this rank needs them, the rest on the CPU.

    Only tensors and plain values are read, so a file from elsewhere can't run code.

    Args:
        path: the checkpoint.
        like: returns for a path in the state the part that the tensor there is cut like; None, or
            what is no part, where it shall come whole.

    Raises:
        UnreadableError: it is damaged, or no checkpoint.
        UsageError: it can't be read, or is not one of this project's checkpoints.
    """
    try:
        state = patiently(partial(_read_twice, path, like), path)
    except UsageError:
        raise
    except Exception as error:  # nor is it said what torch.load raises for what is none
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnreadableError(f"{path} is no checkpoint: {reason}") from None
    if isinstance(state, dict) and {"network", "optimizer", "samples_per_step"} <= set(state):
        raise UsageError(
            f"{path} was saved by an earlier version of this project: finish the run with that "
            "version, or start a new one from its weights with --init-from"
        )
    if not isinstance(state, dict) or not {"networks", "optimizers", "position"} <= set(state):
        raise UsageError(f"{path} is no checkpoint of this project: it was saved by something else")
    return state


def _read_twice(path: Path, like: Callable[..., Tensor | None]) -> Any:  # noqa: ANN401
    try:
        return _read(path, like)
    except OSError:
        raise
    except Exception:
        read_through(path)
        return _read(path, like)


def _read(path: Path, like: Callable[..., Tensor | None]) -> Any:  # noqa: ANN401 - whatever it is
    """Return what a file and its shards hold."""
    with open_regular(path) as file:  # opened here, torch lets an OSError through
        if zipfile.is_zipfile(file):
            _refuse_sizes(file)
        file.seek(0)
        state = torch.load(file, map_location="cpu", weights_only=True)
    _refuse_values(state)
    sharded: dict[str, Tensor | None] = {}

    def look(key_path: KeyPath, leaf: Any) -> None:  # noqa: ANN401
        if isinstance(leaf, str) and leaf == IN_SHARDS:
            sharded[name_in_shards(key_path)] = like(*key_path)

    def fill(key_path: KeyPath, leaf: Any) -> Any:  # noqa: ANN401
        if isinstance(leaf, Tensor):
            return distribute_like(leaf, like(*key_path))
        return parts.get(name_in_shards(key_path), leaf)

    each_leaf(look, state)
    parts = {}
    if sharded:
        from . import dcp

        parts = dcp.read(shards_of(path), sharded)
    return each_leaf(fill, state)


def saved_settings(path: Path) -> dict[str, Any]:
    """Return the settings that a checkpoint was saved with; its tensors are not read.

    Raises:
        UnreadableError: it can't be read, or is no checkpoint of this project.
    """
    try:
        with open_regular(path) as file:
            _refuse_sizes(file)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _refuse_values(state)
    except Exception as error:  # torch.load does not say what it raises
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnreadableError(f"{path} is no checkpoint: {reason}") from None
    if not isinstance(state, dict) or not isinstance(state.get("settings"), dict):
        raise UnreadableError(f"{path} is no checkpoint of this project: it has no settings")
    return state["settings"]


def _refuse_sizes(file: IO[Any]) -> None:
    with zipfile.ZipFile(file) as archive:  # which says more plainly than torch that it is none
        if fault := size_fault(archive):
            raise ValueError(fault)


def _refuse_values(state: Any) -> None:  # noqa: ANN401 - whatever a file holds
    if count(state) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")


def refuse_damage(path: Path) -> None:
    """Refuse a checkpoint with a changed byte, which torch.load does not notice.

    Raises:
        UnreadableError: it is damaged, or no checkpoint.
        UsageError: it can't be read.
    """
    if fault := patiently(partial(find_fault, path), path):
        raise UnreadableError(f"{path} is no readable checkpoint ({fault}): name another one")


def weights(source: Path) -> tuple[Path, dict[str, dict[str, Tensor]]]:
    """Return a file and the parameters of the networks in it, by the networks' names.

    Args:
        source: a run folder, whose best checkpoint is taken, else the newest; a checkpoint; or a
            file of the parameters of one network, as `torch.save(network.state_dict(), file)`
            writes it.

    Raises:
        UsageError: there is none, or it can't be read.
    """
    # Those of other programs may be a link, such as one into a cache.
    linked = source.is_symlink() and step_of(source.name) is None
    path = source.resolve() if linked else source
    if source.is_dir():
        checkpoints = Checkpoints(source / "checkpoints")
        path = checkpoints.best() or checkpoints.newest() or source
    if step_of(path.name) is not None:
        refuse_damage(path)
    try:
        state = patiently(partial(_read, path, lambda *_: None), path)
    except UsageError:
        raise
    except Exception as error:  # nor is it said what torch.load raises for what is none
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnreadableError(f"{path} has no weights that can be read: {reason}") from None
    if isinstance(state, dict) and "position" in state:
        return path, state["averages"] or state["networks"]
    if isinstance(state, dict) and "samples_per_step" in state:  # of an earlier version
        state = state.get("network")
    if isinstance(state, dict) and all(isinstance(each, Tensor) for each in state.values()):
        return path, {"network": state}
    raise UsageError(f"{path} has no weights: give a run folder, a checkpoint or a state_dict")
