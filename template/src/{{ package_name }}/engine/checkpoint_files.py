"""Writes, reads, checks and lists the files of checkpoints.

A checkpoint is a file such as `step-00000500.pt`, which torch.load can read. With FSDP, the sharded
tensors are in a folder next to it, `step-00000500.shards` (shards.py). `step-00000500.sha256` lists
the SHA-256 digests of these files in the format of sha256sum. Two small files, `latest` and `best`,
each contain the name of a checkpoint.
"""

import hashlib
import io
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .errors import UsageError
from .filesystem import HashedFile, remove, sync_names, write_atomically
from .foreign import open_regular, read_bytes, read_tensors
from .nested import KeyPath, each_leaf
from .position import is_due

log = logging.getLogger(__name__)

NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})\.pt")
PARTS = ("networks", "averages", "optimizers", "position", "settings")  # every checkpoint has them
IN_SHARDS = "<in the shards>"  # in the .pt file, stands for a tensor that is in the shards


class Checkpoints:
    """The checkpoints of a run. Only rank 0 writes and removes them.

    Args:
        folder: the folder `checkpoints` of the run folder.
        keep: how many of the newest checkpoints are kept, in addition to the best one.
        keep_every: if it is not 0, checkpoints of steps that are multiples of it are kept, too.
    """

    def __init__(self, folder: Path, keep: int = 3, keep_every: int = 0) -> None:
        self.folder, self.keep, self.keep_every = folder, keep, keep_every

    def path(self, step: int) -> Path:
        """Return the path of a step's checkpoint."""
        return self.folder / f"step-{step:08}.pt"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, the newest first."""
        with errors_explained(self.folder):
            try:
                names = os.listdir(self.folder)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(int(found[1]) for name in names if (found := NAME.fullmatch(name)))[::-1]

    def newest(self) -> Path | None:
        """Return the newest undamaged checkpoint, None if there is none. Log damaged ones.

        Raises:
            UsageError: a checkpoint has no digest file. It need not be damaged, so it must not be
                skipped.
        """
        tried: set[int] = set()
        # List the folder again each time. On a shared file system, a node may see an old listing,
        # although another node has removed those checkpoints and saved newer ones.
        while left := [step for step in self.steps() if step not in tried]:
            tried.add(left[0])
            path = self.path(left[0])
            fault = find_fault(path)
            if not path.exists():
                continue
            if not path.with_suffix(".sha256").exists():
                raise UsageError(
                    f"{path} has no {path.stem}.sha256: restore that file, or set --resume "
                    f"{path} and another --run-dir"
                )
            if not fault:
                return path
            log.warning("skipping the corrupt checkpoint %s: %s", path, fault)
        return None

    def best_name(self) -> str | None:
        """Return what the file `best` says, None before the first validation."""
        with errors_explained(self.folder / "best"):
            try:
                return read_bytes(self.folder / "best").decode(errors="replace").strip()
            except (FileNotFoundError, NotADirectoryError):
                return None

    def best(self) -> Path | None:
        """Return the best checkpoint, None before the first validation.

        Raises:
            UsageError: the file `best` can't be read, or names no checkpoint.
        """
        name = self.best_name()
        if name is None:
            return None
        if not NAME.fullmatch(name) or not (self.folder / name).exists():
            raise UsageError(
                f"{self.folder}: best names {name[:80]!a}, which is no checkpoint there: write the "
                "name of a step-*.pt file to it, or remove it to use the newest"
            )
        return self.folder / name

    def lasting(self) -> list[Path]:
        """Return the checkpoints that are kept because of `keep_every`."""
        return [self.path(step) for step in self.steps() if is_due(self.keep_every, step)]

    def newer(self, step: int) -> list[Path]:
        """Return the files and folders of the checkpoints of later steps, and `best` for one."""
        later = [self.path(each) for each in self.steps() if each > step]
        kinds = (".pt", ".sha256", ".shards")
        files = [x for path in later for kind in kinds if (x := path.with_suffix(kind)).exists()]
        return files + [self.folder / "best"] * (self.best_name() in [path.name for path in later])

    def shard_digests(self, step: int) -> list[str]:
        """Return the lines of a digest file for the shards; an empty list without shards."""
        path = self.path(step)
        with errors_explained(path):
            lines = digest_lines(path) if path.exists() else []
            return [line for line in lines if not line.endswith(path.name)]

    def write(
        self, state: dict[str, Any], step: int, best: bool = False, digests: Sequence[str] = ()
    ) -> None:
        """Write a checkpoint, update `latest` and perhaps `best`, and remove old checkpoints.

        Args:
            state: the state to save; its sharded tensors are replaced by IN_SHARDS.
            step: steps taken so far.
            best: whether this is the best checkpoint.
            digests: the lines of the digest file for new shards, whose temporary folder is then
                renamed. If it is empty, the shards of an earlier save of this step stay.

        Raises:
            OSError, RuntimeError: the disk is full or fails. Earlier checkpoints are unchanged.
        """
        path, shards = self.path(step), self.path(step).with_suffix(".shards")
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_names(self.folder.parent)  # also if another rank made the folder, for its shards
        if digests:
            sync_names(path.with_suffix(".shards.tmp"))
            remove(shards)  # a killed process may have left them
            os.replace(path.with_suffix(".shards.tmp"), shards)
        lines = [*(digests or self.shard_digests(step))]
        # A step may be saved twice. Until the new .pt file replaces the old one, the digest file
        # lists the digests of both.
        old = [line for line in digest_lines(path) if line.endswith(path.name)]

        def content(file: BinaryIO) -> None:
            hashed: Any = HashedFile(file)
            torch.save(state, hashed)
            lines.append(f"{hashed.digest.hexdigest()}  {path.name}")
            write_atomically(path.with_suffix(".sha256"), "\n".join((*lines, *old, "")))

        write_atomically(path, content)
        if old:  # sha256sum would report the old digest as a failure
            write_atomically(path.with_suffix(".sha256"), "\n".join((*lines, "")))
        for pointer in ("latest", "best") if best else ("latest",):
            write_atomically(self.folder / pointer, path.name)
        # Files that end in .tmp are left from a process that was killed.
        kept = {
            path,
            self.folder / (self.best_name() or ""),
            *map(self.path, self.steps()[: self.keep]),
            *self.lasting(),
        }
        for each in self.folder.iterdir():
            old_step = each.name.startswith("step-") and each.with_suffix(".pt") not in kept
            if old_step or each.suffix == ".tmp":
                remove(each)


def check_readable(state: Mapping[str, Any]) -> None:
    """Raise UsageError if `load` could not read a state again: only some classes are safe."""
    for part, value in state.items():
        file = io.BytesIO()
        try:
            torch.save(value, file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except Exception as error:  # of pickle or of torch
            found = re.search(r"GLOBAL (\S+)", str(error))
            what = found[1] if found else str(error).partition("\n")[0]
            raise UsageError(
                f"a checkpoint could not be read again, since '{part}' has {what}: use only "
                "tensors, numbers, texts, tuples, lists and dictionaries"
            ) from None


def digest_lines(path: Path) -> list[str]:
    """Return the lines in a checkpoint's digest file that name files of this checkpoint."""
    try:
        text = read_bytes(path.with_suffix(".sha256")).decode(errors="replace")
    except FileNotFoundError:
        return []
    names = rf"{re.escape(path.name)}|{re.escape(path.stem)}\.shards/[\w.]+"
    return re.findall(rf"^[0-9a-f]{{64}}  (?:{names})$", text, re.MULTILINE)


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, None if nothing is.

    The digests are compared, since torch.load does not notice a changed byte. Without a digest
    file, only a missing .pt file is found.

    Raises:
        UsageError: a file can't be read. This is not damage, so an older checkpoint must not be
            used instead.
    """

    def digest_line(name: str) -> str:
        digest = hashlib.sha256()
        with open_regular(path.parent / name) as file:
            while block := file.read(2**20):
                digest.update(block)
        return f"{digest.hexdigest()}  {name}"

    with errors_explained(path):
        lines = digest_lines(path)
        names = {line[66:] for line in lines}
        if path.name not in names and path.with_suffix(".sha256").exists():
            return f"{path.with_suffix('.sha256').name} does not list it"
        try:
            path.stat()
            # Threads help here: reading and hashing release Python's interpreter lock.
            with ThreadPoolExecutor() as pool:
                wrong = [line[66:] for line in pool.map(digest_line, names) if line not in lines]
        except FileNotFoundError as error:
            return f"{error.filename} is missing"
    return f"{wrong[0]} does not match its checksum" if wrong else None


@contextmanager
def errors_explained(path: Path) -> Iterator[None]:
    """Turn all errors inside the context, where a file is read, into a UsageError.

    This includes all classes of exceptions, since torch does not document those of torch.load.
    """
    try:
        yield
    except ModuleNotFoundError:
        raise  # a package is missing, so the file is not the problem
    except Exception as error:
        if isinstance(error, OSError) and error.errno:
            raise UsageError(
                f"can't read {error.filename or path}: {error.strerror} (errno {error.errno}); "
                "nothing was changed: make the file readable, and run the same command again"
            ) from None
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, UnpicklingError):  # torch's message advises to let the file run code
            reason = "torch.load can't read it with weights_only=True"
        raise UsageError(f"{path} is not a checkpoint: {reason}") from None


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Turn errors inside the context, where a checkpoint's state is loaded, into a UsageError."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).split(chr(9))[-1]
        raise UsageError(
            f"{path} does not fit model.py or this version of the project "
            f"({type(error).__name__}: {reason}): choose another run folder, or restore the files "
            "that it was saved with"
        ) from None


def part_name(key_path: KeyPath) -> str:
    """Return the name of a tensor in the shards."""
    return "/".join(map(str, key_path))


def find(source: Path, which: str = "best") -> Path:
    """Return an undamaged checkpoint.

    Args:
        source: a checkpoint, or a run folder.
        which: the checkpoint of a run folder: "latest" for the newest undamaged one, "best" for
            the best one. Before the first validation, "best" is the newest one, too.

    Raises:
        UsageError: there is no checkpoint, it is damaged, or the file `best` names none.
    """
    own = Checkpoints(source / "checkpoints")
    if source.is_file():
        # A file of another program may be a link, for example into a cache of downloads.
        path: Path | None = source if NAME.fullmatch(source.name) else source.resolve()
    else:
        path = (own.best() if which == "best" else None) or own.newest()
    if path is None:
        raise UsageError(f"{source} has no checkpoint: give a step-*.pt file, or a run folder")
    if fault := find_fault(path):
        raise UsageError(f"{path} is damaged ({fault}): name another checkpoint")
    return path


def find_start(resume: str, run_dir: Path) -> Path | None:
    """Return the checkpoint that a run starts from, None to start from step 0.

    The run folder's own checkpoints come before a path in `resume`, so that a requeued job
    resumes its run from the last checkpoint.

    Args:
        resume: the setting.
        run_dir: the run folder.

    Raises:
        UsageError: `resume` is "never" but the run folder has checkpoints, or the checkpoint that
            `resume` names is damaged or missing.
    """
    own = Checkpoints(run_dir / "checkpoints")
    steps = own.steps()
    if resume == "never" and steps:
        raise UsageError(
            f"resume is never, but {run_dir} holds step {steps[0]} of an earlier run: choose "
            "another --run-dir, or --resume auto"
        )
    newest = own.newest()
    if not newest and resume not in ("auto", "never"):
        return find(Path(resume), "latest")
    if not newest and steps:
        log.warning("all checkpoints in %s are damaged: starting from step 0", own.folder)
    return newest


def load(path: Path, like: Mapping[KeyPath, Any] = {}) -> dict[str, Any]:
    """Return the state in a checkpoint and its shards: `read`, then `complete`."""
    return complete(read(path), path, like)


def read(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint's .pt file, without its shards.

    Args:
        path: the file. Code in it can't run.

    Raises:
        UsageError: the file is not a checkpoint, or can't be read.
    """
    with errors_explained(path):
        state = read_tensors(path)
    return as_checkpoint(state, path)


def as_checkpoint(state: Any, path: Path) -> dict[str, Any]:  # noqa: ANN401 - of a file
    """Return what a file holds if it is a state with all PARTS; raise UsageError if it is none."""
    if not isinstance(state, dict) or not all(isinstance(state.get(x), dict) for x in PARTS):
        raise UsageError(
            f"{path} is not a checkpoint of this version of the project, nor the state_dict of a "
            "network: choose another file, or start a new run"
        )
    return state


def complete(state: dict[str, Any], path: Path, like: Mapping[KeyPath, Any] = {}) -> dict[str, Any]:
    """Return a state with the tensors that are in the shards.

    Args:
        state: the state that `read` returned, or a part of it.
        path: the checkpoint's .pt file.
        like: `Networks.layouts()`. Tensors are distributed over the ranks as the DTensors in it;
            without one for its key path, a tensor is a full one on the CPU.

    Raises:
        UsageError: the shards can't be read.
    """
    in_shards: dict[str, Tensor | None] = {}

    def place(keys: KeyPath, leaf: Any) -> Any:  # noqa: ANN401
        near = like.get(keys, like.get(keys[:-1]))
        if isinstance(leaf, str) and leaf == IN_SHARDS:
            in_shards[part_name(keys)] = near
        if not isinstance(leaf, Tensor) or near is None or near.shape != leaf.shape:
            return leaf
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = near.device_mesh, near.placements
        return distribute_tensor(leaf, mesh, placements, src_data_rank=None)

    with errors_explained(path):
        state = each_leaf(place, state)
        if in_shards:
            from . import shards

            parts = shards.read(path.with_suffix(".shards"), in_shards)
            state = each_leaf(lambda keys, leaf: parts.get(part_name(keys), leaf), state)
    return state
