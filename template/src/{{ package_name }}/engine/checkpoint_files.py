"""The files of checkpoints: how they are written, read and checked, and which one is the newest.

A checkpoint is a file, `step-00000500.pt`, that torch.load reads. With FSDP, the tensors of which
each rank has a part lie in a folder beside it, `step-00000500.shards` (shards.py).
`step-00000500.sha256` lists the digests of these files, as sha256sum prints them. Two small files,
`latest` and `best`, name one checkpoint each.
"""

import hashlib
import logging
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from .errors import UsageError
from .filesystem import open_regular, read_bytes, size_fault, sync_names, write_atomically
from .nested import count
from .ranks.dtensor import distribute_like

log = logging.getLogger(__name__)

KeyPath = tuple[Any, ...]  # the keys that lead to a value in nested dictionaries and lists
Like = Callable[..., Tensor | None]
"""Returns for a key path the tensor whose layout over the ranks the tensor there gets."""

NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})\.pt")
MOST_VALUES = 1_000_000  # of a checkpoint; a tensor is one
LIST = "list.zip"  # in the shards of an earlier version, which only that version can read
IN_SHARDS = "<in the shards>"  # stands in the file for a tensor that is in the folder


class Checkpoints:
    """The checkpoints of a run, in one folder. Only rank 0 changes them.

    Args:
        folder: where they are; made at the first save.
        keep: how many of the newest to keep, besides the best.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep

    def path(self, step: int) -> Path:
        """Return the file of a step's checkpoint."""
        return self.folder / f"step-{step:08}.pt"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, the newest first.

        Raises:
            UsageError: the folder can't be read.
        """
        try:
            names = os.listdir(self.folder)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise unreadable(self.folder, error) from None
        return sorted(int(found[1]) for name in names if (found := NAME.fullmatch(name)))[::-1]

    def undamaged(self) -> Iterator[Path]:
        """Yield the checkpoints with the right digests, newest first; log which are damaged.

        Raises:
            UsageError: one can't be read, which does not mean that it is damaged; or it has no
                digests.
        """
        tried: set[int] = set()
        # Listed again each time: another process may have removed some, and saved newer ones.
        while left := [step for step in self.steps() if step not in tried]:
            tried.add(left[0])
            path = self.path(left[0])
            fault = find_fault(path)
            if not fault:
                yield path
            elif path.exists():
                if not digest_file(path).exists():
                    resume = f"give --resume {path} and another --run-dir, or "
                    raise UsageError(
                        f"{path} has no {digest_file(path).name}: that was lost, or an earlier "
                        "version of this project saved the checkpoint. To go on, "
                        f"{'' if (shards_of(path) / LIST).exists() else resume}"
                        "finish the run with the version that began it"
                    )
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
        try:
            name = read_bytes(self.folder / pointer).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unreadable(self.folder / pointer, error) from None
        named = self.folder / name
        return named if NAME.fullmatch(name) and named.exists() else None

    def newer(self, step: int) -> list[Path]:
        """Return the files and folders of the checkpoints of later steps."""
        later = [self.path(each) for each in self.steps() if each > step]
        files = [each for path in later for each in (path, digest_file(path), shards_of(path))]
        return [each for each in files if each.exists()]

    def write(
        self,
        state: Any,  # noqa: ANN401 - nested
        step: int,
        best: bool = False,
        shards: Path | None = None,
        digests: Sequence[str] = (),
    ) -> None:
        """Write a checkpoint and let `latest` name it, and `best` if it is; remove old ones.

        Args:
            state: what to write, in nested dictionaries and lists.
            step, best: its step, and whether it is the best so far.
            shards: the folder with its shards, which is renamed; None if they are in place.
            digests: the lines of their digests.

        Raises:
            OSError, RuntimeError: the disk did not take it. Earlier checkpoints are unchanged.
        """
        path = self.path(step)
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_names(self.folder.parent)  # another rank may have made the folder, for its shards
        if shards:
            sync_names(shards)
            # A run does not write a step again, unless the files of that step are damaged.
            shutil.rmtree(shards_of(path), ignore_errors=True)
            os.replace(shards, shards_of(path))

        # The file that is there counts until the new one replaces it.
        old = [each for each in digest_lines(path) if each.endswith(path.name)]
        new = [*digests]

        def content(file: BinaryIO) -> None:
            hashed = _Hashed(file)
            torch.save(state, cast("BinaryIO", hashed))
            new.append(f"{hashed.digest.hexdigest()}  {path.name}")
            write_atomically(digest_file(path), "\n".join((*new, *old, "")))

        write_atomically(path, content)
        if old:  # sha256sum would count them as failures
            write_atomically(digest_file(path), "\n".join((*new, "")))
        if not digests:
            shutil.rmtree(shards_of(path), ignore_errors=True)
        for pointer in ("latest", "best") if best else ("latest",):
            write_atomically(self.folder / pointer, path.name)
        self._prune(path)

    def _prune(self, written: Path) -> None:
        """Remove old checkpoints, and what a save that was killed left."""
        kept = {written, self.best(), *map(self.path, self.steps()[: self.keep])}
        for path in self.folder.iterdir():
            old = path.name.startswith("step-") and path.with_suffix(".pt") not in kept
            if (old or path.suffix == ".tmp") and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif old or path.suffix == ".tmp":
                path.unlink(missing_ok=True)


class _Hashed:
    """A file whose content is hashed while it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self.file.write(content)

    def flush(self) -> None:
        self.file.flush()


def shards_of(path: Path) -> Path:
    """Return the folder of a checkpoint's shards, which exists only if there are some."""
    return path.with_suffix(".shards")


def digest_file(path: Path) -> Path:
    """Return the file with the SHA-256 of a checkpoint's files."""
    return path.with_suffix(".sha256")


def digest_line(path: Path, name: str) -> str:
    """Return a file's SHA-256 and its name, as sha256sum prints them.

    Raises:
        OSError: it can't be read.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(2**20):
            digest.update(block)
    return f"{digest.hexdigest()}  {name}"


def digest_lines(path: Path) -> list[str]:
    try:
        return read_bytes(digest_file(path)).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, None if nothing.

    torch.load notices a short file, but not a changed byte.

    Raises:
        UsageError: a file can't be read. That is no damage: no run may start again because of it.
    """
    own = re.compile(rf"{re.escape(path.stem)}\.(pt|shards/(?!\.\.$)[\w.]+)")
    try:
        lines = digest_lines(path)
        names = dict.fromkeys(line[66:] for line in lines)
        if path.name not in names:
            return f"{digest_file(path).name} does not list it"
        for name in names:
            if not own.fullmatch(name):
                return f"{digest_file(path).name} lists {name}"
        # Several at once: Python runs other threads while one hashes or reads.
        with ThreadPoolExecutor() as pool:
            found = pool.map(lambda name: digest_line(path.parent / name, name), names)
            wrong = [line[66:] for line in found if line not in lines]
        return f"{wrong[0]} is not as it was written" if wrong else None
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except OSError as error:
        raise unreadable(path, error) from None


def unreadable(path: Path, error: OSError) -> UsageError:
    """Return the error for a file of a checkpoint that can't be read."""
    return UsageError(
        f"can't read {error.filename or path}: {error.strerror} (errno {error.errno}); nothing was "
        "changed: once it can be read, the same command goes on"
    )


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


def find(source: Path, which: str = "newest") -> Path:
    """Return a checkpoint: the path itself, or one of a run folder.

    Args:
        source: a run folder, its folder of checkpoints, or a file.
        which: of a folder: `best`, `latest`, or `newest`, which is the latest undamaged one.

    Raises:
        UsageError: there is no such file, or the folder has none.
    """
    if source.is_file():
        return source
    if not source.is_dir():
        raise UsageError(f"there is no {source}: give a step-*.pt file, or a run folder")
    inner = source / "checkpoints"
    found = getattr(Checkpoints(inner if inner.is_dir() else source), which)()
    if found is None:
        raise UsageError(f"{source} has no {which} checkpoint: name a run folder that has one")
    return found


def candidates(resume: str, run_dir: Path) -> Iterator[Path]:
    """Yield the checkpoints to start from, the best choice first; none to start from step 0.

    Args:
        resume: `auto`, `never`, or the path of a checkpoint or of a run folder. The run folder's
            own checkpoints come before a path: a requeued job goes on where it was.
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
    if resume not in ("auto", "never"):
        yield find(Path(resume))
    elif steps and not found:
        log.warning("no checkpoint in %s can be read: starting from step 0", own.folder)


def read(path: Path, like: Like = lambda *_: None, check: bool = True) -> Any:  # noqa: ANN401 - whatever the file holds
    """Return what a file that torch wrote holds, and its shards. A file can't run code.

    Args:
        path: the file.
        like: says how tensors are laid out over the ranks; None for a whole one, on the CPU.
        check: whether to compare the digests, if there are some.

    Raises:
        UsageError: it is damaged, is no checkpoint, or can't be read.
    """
    if check and digest_file(path).exists() and (fault := find_fault(path)):
        raise UsageError(f"{path} is no readable checkpoint ({fault}): name another one")
    if (shards_of(path) / LIST).exists():
        raise UsageError(
            f"{path} was saved with FSDP by an earlier version of this project, and only that "
            "version can read it: finish the run with the version that began it"
        )
    sharded: dict[str, Tensor | None] = {}

    def look(key_path: KeyPath, leaf: Any) -> None:  # noqa: ANN401
        if isinstance(leaf, str) and leaf == IN_SHARDS:
            sharded[name_in_shards(key_path)] = like(*key_path)

    def fill(key_path: KeyPath, leaf: Any) -> Any:  # noqa: ANN401
        if isinstance(leaf, Tensor):
            return distribute_like(leaf, like(*key_path))
        return parts.get(name_in_shards(key_path), leaf)

    with _explained(path):
        state = _torch_load(path)
        each_leaf(look, state)
        parts: dict[str, Tensor] = {}
        if sharded:
            from . import shards

            if not shards_of(path).is_dir():
                raise ValueError(f"copy the folder {shards_of(path).name} too, beside the file")
            parts = shards.read(shards_of(path), sharded)
        return each_leaf(fill, state)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what torch raises for a file, which it does not document, into a UsageError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise unreadable(path, error) from None
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, UnpicklingError):  # torch advises here to let the file run code
            reason = "torch.load can't read it with weights_only=True"
        raise UsageError(f"{path} is no checkpoint: {reason}") from None


def _torch_load(path: Path, mmap: bool = False) -> Any:  # noqa: ANN401 - whatever the file holds
    """Return what a file of torch's holds, unless it holds far more than its size tells."""
    with open_regular(path) as file:  # opened here, torch lets an OSError through
        if mmap or file.read(4) == b"PK\x03\x04":  # as torch finds out that it is an archive
            with zipfile.ZipFile(file) as archive:  # says more plainly than torch if it is none
                if fault := size_fault(archive):
                    raise ValueError(fault)
        file.seek(0)
        source = path if mmap else file
        state = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    if count(state) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    return state


def saved_settings(path: Path) -> dict[str, Any]:
    """Return the settings that a checkpoint was saved with; its tensors are not read.

    Raises:
        UsageError: it can't be read, or is no checkpoint of this project.
    """
    with _explained(path):
        state = _torch_load(path, mmap=True)
    if not isinstance(state, dict) or not isinstance(state.get("settings"), dict):
        raise UsageError(f"{path} is no checkpoint of this project: it has no settings")
    return state["settings"]


def load(path: Path, like: Like = lambda *_: None, check: bool = True) -> dict[str, Any]:
    """Return a checkpoint's state, as `read` does.

    Raises:
        UsageError: it can't be read, or is not one of this project's checkpoints.
    """
    state = read(path, like, check)
    if not isinstance(state, dict) or not {"networks", "optimizers", "position"} <= set(state):
        raise UsageError(
            f"{path} is no checkpoint of this version of the project: start a new run from its "
            "weights with --init-from"
        )
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
    # A file of another program may be a link, such as one into a cache.
    linked = source.is_symlink() and source.is_file() and not NAME.fullmatch(source.name)
    best = Checkpoints(source / "checkpoints").best()
    path = best or find(source.resolve() if linked else source)
    state = read(path)
    if isinstance(state, dict) and "position" in state:
        return path, state["averages"] or state["networks"]
    if isinstance(state, dict) and "samples_per_step" in state:  # of an earlier version
        state = state.get("network")
    if isinstance(state, dict) and all(isinstance(each, Tensor) for each in state.values()):
        return path, {"network": state}
    raise UsageError(f"{path} has no weights: give a run folder, a checkpoint or a state_dict")


def name_in_shards(key_path: KeyPath) -> str:
    """Return the name of a tensor in the shards."""
    return "/".join(map(str, key_path))
