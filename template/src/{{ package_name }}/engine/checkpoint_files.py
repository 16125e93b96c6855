"""The files of checkpoints: how they are written, read and checked, and which one is the newest.

A checkpoint is a file, `step-00000500.pt`, that torch.load reads. With FSDP, the tensors of which
each rank has a part are in a folder beside it, `step-00000500.shards` (shards.py).
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
MOST_VALUES = 1_000_000  # in a checkpoint; a tensor counts as one
IN_SHARDS = "<in the shards>"  # replaces in the file a tensor that is in the folder


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
        with errors_explained(self.folder):
            try:
                names = os.listdir(self.folder)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(int(found[1]) for name in names if (found := NAME.fullmatch(name)))[::-1]

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint, None if there is none. Log damaged ones.

        Raises:
            UsageError: one can't be read, or has no digests. It need not be damaged.
        """
        tried: set[int] = set()
        # Listed again each time: a node may see an old listing of a shared folder, whose
        # checkpoints another node has removed since, and saved newer ones.
        while left := [step for step in self.steps() if step not in tried]:
            tried.add(left[0])
            path = self.path(left[0])
            fault = find_fault(path)
            if not fault:
                return path
            if not path.exists():
                continue
            if not digest_file(path).exists():
                raise UsageError(
                    f"{path} has no {digest_file(path).name}: bring that file back, or give "
                    f"--resume {path} and another --run-dir"
                )
            log.warning("skipping the corrupt checkpoint %s: %s", path, fault)
        return None

    def best(self) -> Path | None:
        """Return the best checkpoint, None before the first validation."""
        return self._named("best")

    def latest(self) -> Path | None:
        """Return the checkpoint that was saved last, None before the first."""
        return self._named("latest")

    def _named(self, pointer: str) -> Path | None:
        """Return the checkpoint that `latest` or `best` names, None if it does not exist."""
        with errors_explained(self.folder / pointer):
            try:
                name = read_bytes(self.folder / pointer).decode(errors="replace")
            except (FileNotFoundError, NotADirectoryError):
                return None
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
            state: nested dictionaries and lists.
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

        # An existing file of this step counts until the new one replaces it.
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
        """Remove old checkpoints, and the unfinished files of a process that was killed."""
        kept = {written, self.best(), *map(self.path, self.steps()[: self.keep])}
        for path in self.folder.iterdir():
            old = path.name.startswith("step-") and path.with_suffix(".pt") not in kept
            if (old or path.suffix == ".tmp") and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif old or path.suffix == ".tmp":
                path.unlink(missing_ok=True)


class _Hashed:
    """A file whose content is hashed while it is written.

    A shared disk may show late what was written, so a digest of the file itself may be wrong.
    """

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
    """Return a file's SHA-256 and a name, as sha256sum prints them.

    Raises:
        OSError: the file can't be read.
    """
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(2**20):
            digest.update(block)
    return f"{digest.hexdigest()}  {name}"


def digest_lines(path: Path) -> list[str]:
    """Return the lines of a checkpoint's digests, none if there is no such file."""
    try:
        return read_bytes(digest_file(path)).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, None if nothing.

    torch.load notices a short file, but not a changed byte.

    Raises:
        UsageError: a file can't be read. This is not damage, so the run must not start again.
    """
    own = re.compile(rf"{re.escape(path.stem)}\.(pt|shards/(?!\.\.$)[\w.]+)")
    with errors_explained(path):
        lines = digest_lines(path)
        names = dict.fromkeys(line[66:] for line in lines)
        if path.name not in names:
            return f"{digest_file(path).name} does not list it"
        for name in names:
            if not own.fullmatch(name):
                return f"{digest_file(path).name} lists {name}"
        try:
            # In threads: Python runs others while one reads or hashes.
            with ThreadPoolExecutor() as pool:
                found = pool.map(lambda name: digest_line(path.parent / name, name), names)
                wrong = [line[66:] for line in found if line not in lines]
        except FileNotFoundError as error:
            return f"{error.filename} is missing"
    return f"{wrong[0]} is not as it was written" if wrong else None


@contextmanager
def errors_explained(path: Path) -> Iterator[None]:
    """Raise a UsageError for whatever reading a file raises; torch does not document what it is."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise UsageError(
                f"can't read {error.filename or path}: {error.strerror} (errno {error.errno}); "
                "nothing was changed: once it can be read, the same command goes on"
            ) from None
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, UnpicklingError):  # torch advises here to let the file run code
            reason = "torch.load can't read it with weights_only=True"
        raise UsageError(f"{path} is not a checkpoint: {reason}") from None


def each_leaf(function: Callable[[KeyPath, Any], Any], value: Any, key_path: KeyPath = ()) -> Any:  # noqa: ANN401
    """Return nested dictionaries and lists with each value replaced by what a function returns."""
    if isinstance(value, dict):
        replaced = copy(value)  # with the attribute of a state_dict for the versions of layers
        for key, each in value.items():
            replaced[key] = each_leaf(function, each, (*key_path, key))
        return replaced
    if isinstance(value, list | tuple):
        return type(value)(each_leaf(function, x, (*key_path, i)) for i, x in enumerate(value))
    return function(key_path, value)


def name_in_shards(key_path: KeyPath) -> str:
    """Return the name of a tensor in the shards."""
    return "/".join(map(str, key_path))


def find(source: Path, which: str = "newest") -> Path:
    """Return a checkpoint: the path itself, or one of a run folder.

    Args:
        source: a run folder, its folder of checkpoints, or a file.
        which: of a folder: `best`, `latest`, or `newest`, which is the newest undamaged one.

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


def find_start(resume: str, run_dir: Path) -> Path | None:
    """Return the checkpoint that a run starts from, None to start from step 0.

    Args:
        resume: `auto`, `never`, or the path of a checkpoint or of a run folder. The run folder's
            own checkpoints come before a path: a requeued job goes on where it was.
        run_dir: this run's folder.

    Raises:
        UsageError: the path has no checkpoint, the run folder has some in spite of `never`, or a
            file can't be read.
    """
    own = Checkpoints(run_dir / "checkpoints")
    steps = own.steps()
    if resume == "never" and steps:
        raise UsageError(
            f"resume is never, but {run_dir} holds step {steps[0]} of an earlier run: choose "
            "another --run-dir, or --resume auto"
        )
    if newest := own.newest():
        return newest
    if resume not in ("auto", "never"):
        return find(Path(resume))
    if steps:
        log.warning("no checkpoint in %s is undamaged: starting from step 0", own.folder)
    return None


def read(path: Path, like: Like = lambda *_: None, check: bool = True) -> Any:  # noqa: ANN401
    """Return the content of a file that torch wrote, and of its shards. It can't run code.

    Args:
        path: the file.
        like: says how tensors are laid out over the ranks; None for a whole one, on the CPU.
        check: whether to compare the digests, if there are some.

    Raises:
        UsageError: it is damaged, is not a checkpoint, or can't be read.
    """
    if check and digest_file(path).exists() and (fault := find_fault(path)):
        raise UsageError(f"{path} is damaged ({fault}): name another checkpoint")
    sharded: dict[str, Tensor | None] = {}

    def look(key_path: KeyPath, leaf: Any) -> None:  # noqa: ANN401
        if isinstance(leaf, str) and leaf == IN_SHARDS:
            sharded[name_in_shards(key_path)] = like(*key_path)

    def fill(key_path: KeyPath, leaf: Any) -> Any:  # noqa: ANN401
        if isinstance(leaf, Tensor):
            return distribute_like(leaf, like(*key_path))
        return parts.get(name_in_shards(key_path), leaf)

    with errors_explained(path):
        state = _torch_load(path)
        each_leaf(look, state)
        parts: dict[str, Tensor] = {}
        if sharded:
            from . import shards

            if not shards_of(path).is_dir():
                raise ValueError(f"copy the folder {shards_of(path).name} too, beside the file")
            parts = shards.read(shards_of(path), sharded)
        return each_leaf(fill, state)


def _torch_load(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    """Return the content of a file that torch wrote, unless it is much larger than the file."""
    with open_regular(path) as file:  # torch would replace an OSError by an error of its own
        if file.read(4) == b"PK\x03\x04":  # torch takes these bytes for an archive
            with zipfile.ZipFile(file) as archive:
                if fault := size_fault(archive):
                    raise ValueError(fault)
        file.seek(0)
        state = torch.load(file, map_location="cpu", weights_only=True)
    if count(state) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    return state


def saved_settings(path: Path) -> dict[str, Any]:
    """Return the settings that a checkpoint was saved with. The digests are not compared.

    Raises:
        UsageError: it can't be read, or is not a checkpoint of this project.
    """
    with errors_explained(path):
        state = _torch_load(path)
    if not isinstance(state, dict) or not isinstance(state.get("settings"), dict):
        raise UsageError(f"{path} is not a checkpoint of this project: it has no settings")
    return state["settings"]


def load(path: Path, like: Like = lambda *_: None, check: bool = True) -> dict[str, Any]:
    """Return a checkpoint's state, as `read` does.

    Raises:
        UsageError: it can't be read, or is not one of this project's checkpoints.
    """
    state = read(path, like, check)
    if not isinstance(state, dict) or not {"networks", "optimizers", "position"} <= set(state):
        raise UsageError(
            f"{path} is not a checkpoint of this version of the project: start a new run from its "
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
    if isinstance(state, dict):
        if "position" in state:
            return path, state["averages"] or state["networks"]
        if all(isinstance(each, Tensor) for each in state.values()):
            return path, {"network": state}
    raise UsageError(f"{path} has no weights: give a run folder, a checkpoint or a state_dict")
