"""Checkpoints: what is in them, when one counts, and which one a run goes on from.

A checkpoint is a file, `step-00000500.pt`, that torch.load reads. With FSDP, the tensors of which
each rank has a part lie in a folder beside it, `step-00000500.shards` (shards.py).
`step-00000500.sha256` lists the digests of these files, as sha256sum prints them. Two small files,
`latest` and `best`, name one checkpoint each.
"""

import hashlib
import logging
import math
import os
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import Settings
from ..errors import UsageError
from ..filesystem import open_regular, read_bytes, size_fault, sync_names, write_atomically
from ..nested import count
from ..output.log import log_resume
from ..output.metrics import Meter
from ..ranks.dtensor import distribute_like, is_dtensor
from ..ranks.strategy import parameter_norm
from ..ranks.world import World
from .position import Position

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .networks import Networks

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
        old = [each for each in _digest_lines(path) if each.endswith(path.name)]
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


def _digest_lines(path: Path) -> list[str]:
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
        lines = _digest_lines(path)
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


class Checkpointing:
    """Saves everything that a resumed run needs, in the background, and restores it.

    Rank 0 writes the file; before that, all ranks together write the shards, if there are parts.
    Random generators are not saved: they are seeded for each step and each sample.

    Args:
        networks, meter: what to save and restore, besides the position.
        settings: of the run. world: the ranks.
        samples_per_step: of all ranks.

    Attributes:
        position: where the training is.
        line_count: lines of metrics.jsonl at the checkpoint, None without one.
        resumed_from: the checkpoint's step, None without one.
        resized: whether epochs or max_steps were others there.
    """

    def __init__(
        self,
        networks: "Networks",
        meter: Meter,
        settings: Settings,
        world: World,
        samples_per_step: int,
    ) -> None:
        self.networks, self.meter, self.settings, self.world = networks, meter, settings, world
        self.samples_per_step = samples_per_step
        self.run_dir = Path(str(settings.run_dir))
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", settings.keep_checkpoints)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.writing: Future[bool] | None = None
        self.copies: dict[KeyPath, Tensor] = {}
        # At an epoch's end, two checkpoints of one step have the same parameters.
        self.sharded_step: int | None = None
        self.digests: list[str] = []
        self.position = Position()
        self.line_count: int | None = None
        self.resumed_from: int | None = None
        self.resized = False
        self._resume()

    def save(self, line_count: int | None, before: Callable[[], object], best: bool) -> None:
        """Copy everything to memory and start to write it; every rank calls this.

        Waits for the checkpoint before, if that is still being written.

        Args:
            line_count: lines of metrics.jsonl by now.
            before: called in the background before the checkpoint counts; an OSError prevents it.
            best: whether this is the best checkpoint by now.

        Raises:
            UsageError: on every rank, if a network has diverged: the checkpoints from before are
                worth more than this one.
        """
        norm = parameter_norm(self.networks.modules.values()).item()
        self.refuse_divergence("the norm of all parameters is", norm)
        state: dict[str, Any] = {
            **self.networks.state(),
            "position": self.position.as_dict(),
            "meter": self.meter.state(self.world),
            "line_count": line_count,
            "world_size": self.world.size,
            "samples_per_step": self.samples_per_step,
            "settings": self.settings.as_dict(),
        }
        self.start_writing(state, self.position.step, best, before)

    def start_writing(
        self, state: dict[str, Any], step: int, best: bool, before: Callable[[], object]
    ) -> None:
        """Copy a state to memory and write it in the background, as `save` does."""
        self.wait()
        parts: dict[str, Tensor] = {}

        def copied(key_path: KeyPath, leaf: Any) -> Any:  # noqa: ANN401 - whatever a state holds
            if is_dtensor(leaf):
                parts[name_in_shards(key_path)] = self._copied_part(key_path, leaf)
                return IN_SHARDS
            if isinstance(leaf, Tensor):
                return self._copied(key_path, leaf) if self.world.is_main else None
            return leaf

        with torch.no_grad():
            state = each_leaf(copied, state)
        done = torch.cuda.Event() if self.world.device.type == "cuda" else None
        if done:
            # The GPU copies before it computes the next step, and only the thread waits for it.
            done.record()
        self.writing = self.thread.submit(self._write, done, before, state, parts, step, best)

    def wait(self) -> bool:
        """Wait until nothing is being written; return whether the last one was."""
        return self.writing.result() if self.writing else True

    def __enter__(self) -> "Checkpointing":
        return self

    def __exit__(self, *_failure: object) -> None:
        """Wait, also after an error, and let go of the other ranks."""
        self.wait()
        self.thread.shutdown()
        self.__dict__.pop("mesh", None)

    def refuse_divergence(self, what: str, value: float) -> None:
        """Raise UsageError for a value that is not finite; every rank calls this with the same."""
        if not math.isfinite(value):
            self.world.broadcast(self.wait())  # rank 0 writes the file that all of them name
            newest = self.checkpoints.latest() or "none had been saved yet"
            raise UsageError(
                f"{what} {value} at step {self.position.step}: lower lr, lengthen warmup, or set "
                f"clip_norm; the last checkpoint from before: {newest}"
            )

    def refuse_unsaved(self, what: str) -> None:
        """Wait for the last save; raise UsageError on every rank if it failed."""
        if not self.world.broadcast(self.wait()):
            raise UsageError(
                f"{what} at step {self.position.step}, but the checkpoint could not be written: "
                f"make room for {self.checkpoints.folder}; the same command then goes on from the "
                "checkpoint before, if there is one"
            )

    def _copied(self, key_path: KeyPath, tensor: Tensor) -> Tensor:
        """Return a copy on the CPU, in the memory of the checkpoint before."""
        copy = self.copies.get(key_path)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self.copies[key_path] = copy
        return copy.copy_(tensor, non_blocking=tensor.is_cuda)

    def _copied_part(self, key_path: KeyPath, part: Any) -> Tensor:  # noqa: ANN401 - a DTensor
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            self._copied(key_path, part.to_local()),
            self.mesh,
            part.placements,
            run_check=False,
            shape=part.shape,
            stride=part.stride(),
        )

    @cached_property
    def mesh(self) -> "DeviceMesh":
        """The ranks' CPUs; the thread's communication must not mix with that of the training."""
        from torch.distributed.device_mesh import DeviceMesh

        timeout = timedelta(seconds=self.settings.timeout)
        return DeviceMesh.from_group(dist.new_group(backend="gloo", timeout=timeout), "cpu")

    def _write(
        self,
        copied: torch.cuda.Event | None,
        before: Callable[[], object],
        state: dict[str, Any],
        parts: dict[str, Tensor],
        step: int,
        best: bool,
    ) -> bool:
        """Write a checkpoint; return whether it counts."""
        if copied:
            copied.synchronize()
        path = self.checkpoints.path(step)
        folder = Path(f"{shards_of(path)}.tmp")
        try:
            if parts and self.sharded_step != step:
                self.digests = self._write_shards(path, folder, parts)
                self.sharded_step = step
            before()
            if self.world.is_main:
                moved = folder if parts and folder.exists() else None
                digests = self.digests if parts else []
                self.checkpoints.write(state, step, best, moved, digests)
        except (OSError, RuntimeError) as error:  # torch makes a RuntimeError of some OSErrors
            if self.world.is_main:
                log.error(
                    "could not write %s (%s); training goes on, and a resume would start from %s",
                    path,
                    str(error).splitlines()[0],
                    getattr(self.checkpoints.latest(), "name", "the beginning"),
                )
                if self.sharded_step != step:
                    shutil.rmtree(folder, ignore_errors=True)
            return False
        return True

    def _write_shards(self, path: Path, folder: Path, parts: dict[str, Tensor]) -> list[str]:
        """Write this rank's parts; return the lines of all ranks' digests."""
        from . import shards

        if self.world.is_main:
            # Of a save that was killed. The other ranks write only after rank 0's plan.
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                folder.unlink()  # a link, which would lead the shards elsewhere
        group = self.mesh.get_group()
        shards.write(folder, parts, group)
        own = [*folder.glob(f"__{self.world.rank}_*")]
        lines: Any = [None] * self.world.size
        try:
            names = [folder / ".metadata", *own] if self.world.is_main else own
            mine: Any = [digest_line(x, f"{shards_of(path).name}/{x.name}") for x in names]
        except OSError as error:
            mine = error
        dist.all_gather_object(lines, mine, group)
        for each in lines:
            if isinstance(each, OSError):
                raise each
        return [line for each in lines for line in each]

    def _resume(self) -> None:
        """Go on from the checkpoint that rank 0 finds, if there is one; every rank loads it."""
        found = candidates(self.settings.resume, self.run_dir)
        path = self.world.on_main(lambda: next(found, None))
        if path is None:
            if self.networks.not_initialized:
                raise self.networks.not_initialized
            return
        state, error = {}, None
        try:
            # One rank reads all shards for the digests; each of the others reads its parts only.
            state = load(path, self.networks.like, check=self.world.is_main)
        except UsageError as caught:
            error = caught
        for each in self.world.gather(error):
            if each:
                raise each
        try:
            self._load(path, state)
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"{path} does not fit model.py ({str(error).split(chr(9))[-1]}): choose another "
                "--run-dir, or bring back the model that it was saved from"
            ) from None
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} was not saved by this version of the project ({type(error).__name__}: "
                f"{error}): choose another --run-dir, or bring back the version that saved it"
            ) from None

    def _load(self, path: Path, state: dict[str, Any]) -> None:
        self.networks.load(state)
        self.position = Position.from_dict(state["position"])
        if state["samples_per_step"] != self.samples_per_step:
            # The batches that each rank would have had by now.
            self.position.epoch_steps = self.position.consumed // self.samples_per_step
        self.meter.resume(state["meter"], self.world)
        self.line_count = state["line_count"]
        log_resume(path, state, self.settings, self.world)
        before, now = state["settings"], self.settings
        self.resized = (before["epochs"], before["max_steps"]) != (now.epochs, now.max_steps)
        self.resumed_from = self.position.step
        shards = [each for each in _digest_lines(path) if not each.endswith(path.name)]
        if path.parent == self.checkpoints.folder and self.world.broadcast(shards):
            self.sharded_step, self.digests = self.position.step, shards
