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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO

import torch
from torch import Tensor

from . import weights
from .errors import UsageError
from .filesystem import (
    HashedFile,
    check_archive,
    open_regular,
    read_bytes,
    remove,
    sync_names,
    write_atomically,
)
from .nested import count
from .position import is_due
from .ranks.dtensor import distribute_like

log = logging.getLogger(__name__)

KeyPath = tuple[Any, ...]  # the keys that lead to a value in nested dictionaries and lists
NAME = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,17})\.pt")
PARTS = ("networks", "averages", "optimizers", "position", "settings")  # of every checkpoint
MOST_VALUES = 1_000_000  # in a checkpoint; a tensor counts as one
IN_SHARDS = "<in the shards>"  # replaces in the file a tensor that is in the folder


class Checkpoints:
    """The checkpoints of a run: the `keep` newest, the best, and those of each `keep_every` steps.

    Only rank 0 changes them.
    """

    def __init__(self, folder: Path, keep: int = 3, keep_every: int = 0) -> None:
        self.folder, self.keep, self.keep_every = folder, keep, keep_every

    def path(self, step: int) -> Path:
        """Return the file of a step's checkpoint."""
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

        Raise UsageError for one that has no digests: it need not be damaged.
        """
        tried: set[int] = set()
        # Listed again each time: a node may see an old listing of a shared folder, whose
        # checkpoints another node has removed since, and saved newer ones.
        while left := [step for step in self.steps() if step not in tried]:
            tried.add(left[0])
            path = self.path(left[0])
            fault = find_fault(path)
            if not path.exists():
                continue
            if not path.with_suffix(".sha256").exists():
                raise UsageError(
                    f"{path} has no {path.stem}.sha256: bring that file back, or give --resume "
                    f"{path} and another --run-dir"
                )
            if not fault:
                return path
            log.warning("skipping the corrupt checkpoint %s: %s", path, fault)
        return None

    def best(self) -> Path | None:
        """Return the best checkpoint, None before the first validation."""
        with errors_explained(self.folder / "best"):
            try:
                name = read_bytes(self.folder / "best").decode(errors="replace")
            except (FileNotFoundError, NotADirectoryError):
                return None
        named = self.folder / name
        return named if NAME.fullmatch(name) and named.exists() else None

    def lasting(self) -> list[Path]:
        """Return the checkpoints that `keep_every` keeps."""
        return [self.path(step) for step in self.steps() if is_due(self.keep_every, step)]

    def newer(self, step: int) -> list[Path]:
        """Return the files and folders of the checkpoints of later steps."""
        later = [self.path(each) for each in self.steps() if each > step]
        kinds = (".pt", ".sha256", ".shards")
        return [x for path in later for kind in kinds if (x := path.with_suffix(kind)).exists()]

    def shard_digests(self, step: int) -> list[str]:
        """Return the lines of the digests of a checkpoint's shards, none if it has none."""
        path = self.path(step)
        with errors_explained(path):
            lines = digest_lines(path) if path.exists() else []
            return [line for line in lines if not line.endswith(path.name)]

    def write(
        self, state: dict[str, Any], step: int, best: bool = False, digests: Sequence[str] = ()
    ) -> None:
        """Write a checkpoint and let `latest` name it, and `best` if it is; remove old ones.

        `digests` has the lines of new shards, whose folder is then renamed. Without it, those stay
        that are in place. If the disk does not take the checkpoint, OSError or RuntimeError is
        raised, and earlier ones are unchanged.
        """
        path, shards = self.path(step), self.path(step).with_suffix(".shards")
        self.folder.mkdir(parents=True, exist_ok=True)
        sync_names(self.folder.parent)  # another rank may have made the folder, for its shards
        if digests:
            sync_names(path.with_suffix(".shards.tmp"))
            remove(shards)  # of a process that was killed
            os.replace(path.with_suffix(".shards.tmp"), shards)
        lines = [*(digests or self.shard_digests(step))]
        # A step may be saved twice: until the new file replaces the old one, either counts.
        old = [line for line in digest_lines(path) if line.endswith(path.name)]

        def content(file: BinaryIO) -> None:
            hashed: Any = HashedFile(file)
            torch.save(state, hashed)
            lines.append(f"{hashed.digest.hexdigest()}  {path.name}")
            write_atomically(path.with_suffix(".sha256"), "\n".join((*lines, *old, "")))

        write_atomically(path, content)
        if old:  # sha256sum would count its line as a failure
            write_atomically(path.with_suffix(".sha256"), "\n".join((*lines, "")))
        for pointer in ("latest", "best") if best else ("latest",):
            write_atomically(self.folder / pointer, path.name)
        # Unfinished files are those of a process that was killed.
        kept = {path, self.best(), *map(self.path, self.steps()[: self.keep]), *self.lasting()}
        for each in self.folder.iterdir():
            old_step = each.name.startswith("step-") and each.with_suffix(".pt") not in kept
            if old_step or each.suffix == ".tmp":
                remove(each)


def digest_lines(path: Path) -> list[str]:
    """Return the lines in a checkpoint's digest file that name its own files."""
    try:
        text = read_bytes(path.with_suffix(".sha256")).decode(errors="replace")
    except FileNotFoundError:
        return []
    names = rf"{re.escape(path.name)}|{re.escape(path.stem)}\.shards/[\w.]+"
    return re.findall(rf"^[0-9a-f]{{64}}  (?:{names})$", text, re.MULTILINE)


def find_fault(path: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, None if nothing, or if there are no digests.

    torch.load notices a short file, but not a changed byte. If a file can't be read, UsageError is
    raised: this is not damage, so the run must not start again.
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
            # In threads: Python runs others while one reads or hashes.
            with ThreadPoolExecutor() as pool:
                wrong = [line[66:] for line in pool.map(digest_line, names) if line not in lines]
        except FileNotFoundError as error:
            return f"{error.filename} is missing"
    return f"{wrong[0]} is not as it was written" if wrong else None


@contextmanager
def errors_explained(path: Path) -> Iterator[None]:
    """Raise a UsageError for whatever reading a file raises; torch does not document what it is."""
    try:
        yield
    except ModuleNotFoundError:
        raise  # a package is missing, whatever the file is
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


def part_name(key_path: KeyPath) -> str:
    """Return the name of a tensor in the shards."""
    return "/".join(map(str, key_path))


def find(source: Path, which: str = "best") -> Path:
    """Return an undamaged checkpoint: the path itself, or one of a run folder.

    `latest` is the newest undamaged one of a folder. So is `best` before the first validation.
    Raises UsageError if there is none, or if it is damaged.
    """
    own = Checkpoints(source / "checkpoints")
    if source.is_file():
        # A file of another program may be a link, such as one into a cache.
        path: Path | None = source if NAME.fullmatch(source.name) else source.resolve()
    else:
        path = (own.best() if which == "best" else None) or own.newest()
    if path is None:
        raise UsageError(f"no checkpoint is in {source}: give a step-*.pt file, or a run folder")
    if fault := find_fault(path):
        raise UsageError(f"{path} is damaged ({fault}): name another checkpoint")
    return path


def find_start(resume: str, run_dir: Path) -> Path | None:
    """Return the checkpoint that a run starts from, None to start from step 0.

    The run folder's own checkpoints come before a path in the setting `resume`: a requeued job goes
    on where it was.
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
        log.warning("no checkpoint in %s is undamaged: starting from step 0", own.folder)
    return newest


def load(path: Path, like: Callable[..., Tensor | None] = lambda *_: None) -> dict[str, Any]:
    """Return the state in a checkpoint and its shards, as `read` and `complete` describe it."""
    return complete(read(path), path, like)


def read(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint's file, without its shards; or in that of a state_dict.

    That may be a file of torch.save or of safetensors. No file can run code. Raises UsageError if
    it is no checkpoint, or can't be read.
    """
    with errors_explained(path):
        with open_regular(path) as file:  # torch would replace an OSError by an error of its own
            if weights.is_safetensors(path, file):
                state: Any = weights.read(path, MOST_VALUES)
            else:
                check_archive(file)
                state = torch.load(file, map_location="cpu", weights_only=True)
        if count(state) > MOST_VALUES:
            raise ValueError(f"it has more than {MOST_VALUES} values")
    if isinstance(state, dict) and all(isinstance(each, Tensor) for each in state.values()):
        state = {**{part: {} for part in PARTS}, "networks": {"network": state}}
    if not isinstance(state, dict) or not all(isinstance(state.get(x), dict) for x in PARTS):
        raise UsageError(
            f"{path} is not a checkpoint of this version of the project, nor the state_dict of a "
            "network: choose another file, or start a new run"
        )
    return state


def complete(
    state: dict[str, Any], path: Path, like: Callable[..., Tensor | None]
) -> dict[str, Any]:
    """Return a state that `read` returned, or some of it, with its tensors in the shards.

    `like` returns for a key path a tensor whose layout over the ranks the tensor there gets; None
    is for a whole one, on the CPU. Raises UsageError if the shards can't be read.
    """
    layouts: dict[str, Tensor | None] = {}

    def place(key_path: KeyPath, leaf: Any) -> Any:  # noqa: ANN401
        if isinstance(leaf, str) and leaf == IN_SHARDS:
            layouts[part_name(key_path)] = like(*key_path)
        return distribute_like(leaf, like(*key_path)) if isinstance(leaf, Tensor) else leaf

    with errors_explained(path):
        state = each_leaf(place, state)
        if layouts:
            from . import shards

            parts = shards.read(path.with_suffix(".shards"), layouts)
            state = each_leaf(lambda keys, leaf: parts.get(part_name(keys), leaf), state)
    return state
