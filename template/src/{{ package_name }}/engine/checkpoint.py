"""What a checkpoint holds, how it is saved in the background, and how a run resumes from it."""

import logging
import math
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .checkpoint_files import (
    IN_SHARDS,
    Checkpoints,
    KeyPath,
    digest_line,
    digest_lines,
    each_leaf,
    find_start,
    load,
    name_in_shards,
    shards_of,
)
from .config import Settings
from .errors import UsageError
from .networks import Networks
from .position import Position
from .ranks.dtensor import is_dtensor
from .ranks.strategy import parameter_norm
from .ranks.world import World
from .run.messages import log_resume
from .run.meters import Meter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)


class Checkpointing:
    """Saves everything that a resumed run needs, in the background, and restores it.

    Rank 0 writes the file. With FSDP, all ranks together write the shards before that.
    Random generators are not saved: they are seeded for each step and each sample.

    Args:
        networks, meter: what to save and restore, besides the position.
        settings: of the run. world: the ranks.
        samples_per_step: of all ranks.

    Attributes:
        position: where the training is.
        line_count: lines of metrics.jsonl at the checkpoint, None without one.
        resumed_from: the checkpoint's step, None without one.
    """

    def __init__(
        self,
        networks: Networks,
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
        # At an epoch's end, a step is saved twice, but its shards only once.
        self.sharded_step: int | None = None
        self.digests: list[str] = []
        self.position = Position()
        self.line_count: int | None = None
        self.resumed_from: int | None = None
        self._resume()

    def save(self, line_count: int | None, before: Callable[[], object], best: bool) -> None:
        """Copy everything to memory and start to write it; every rank calls this.

        If the last checkpoint is still being written, wait for it first.

        Args:
            line_count: lines of metrics.jsonl by now.
            before: called in the background before the checkpoint counts; an OSError prevents it.
            best: whether this is the best checkpoint by now.

        Raises:
            UsageError: on every rank, if a network has diverged. Nothing is saved then.
        """
        norm = parameter_norm(self.networks.modules.values()).item()
        self.check_finite("the norm of all parameters is", norm)
        state: dict[str, Any] = {
            **self.networks.state_dict(),
            "position": self.position.state_dict(),
            "meter": self.meter.state_dict(self.world),
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
        """Wait, also after an error, and leave the process group of the background thread."""
        self.wait()
        self.thread.shutdown()
        self.__dict__.pop("mesh", None)

    def check_finite(self, what: str, value: float) -> None:
        """Raise UsageError for a value that is not finite; it is the same on every rank."""
        if not math.isfinite(value):
            self.world.broadcast(self.wait())  # so that every rank names the same checkpoint
            newest = self.checkpoints.latest() or "none"
            raise UsageError(
                f"{what} {value} at step {self.position.step}: lower lr, lengthen warmup, or set "
                f"clip_norm; the last good checkpoint: {newest}"
            )

    def check_saved(self, what: str) -> None:
        """Wait for the last save; raise UsageError on every rank if it failed."""
        if not self.world.broadcast(self.wait()):
            raise UsageError(
                f"{what} at step {self.position.step}, but the checkpoint could not be written: "
                f"make room for {self.checkpoints.folder}; the same command then goes on from the "
                "last good checkpoint, if there is one"
            )

    def _copied(self, key_path: KeyPath, tensor: Tensor) -> Tensor:
        """Return a copy on the CPU, in the memory of the last checkpoint's copy."""
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
        """The ranks' CPUs, in a process group of the background thread alone."""
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
            # A killed process may have left it. The other ranks write only after rank 0's plan.
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
        path = self.world.on_main(lambda: find_start(self.settings.resume, self.run_dir))
        if path is None:
            if self.networks.not_initialized:
                raise self.networks.not_initialized
            return
        state, error = {}, None
        try:
            # Rank 0 reads all shards to compare the digests. Other ranks read only their parts.
            state = load(path, self.networks.like, check=self.world.is_main)
        except UsageError as caught:
            error = caught
        for each in self.world.gather(error):
            if each:
                raise each
        try:
            self._load_state_dict(state)
            log_resume(path, state, self.settings, self.world)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as caught:
            reason = str(caught).split(chr(9))[-1]
            raise UsageError(
                f"{path} does not fit model.py or this version of the project "
                f"({type(caught).__name__}: {reason}): choose another --run-dir, or bring back "
                "the files that it was saved with"
            ) from None
        shards = [each for each in digest_lines(path) if not each.endswith(path.name)]
        if path.parent == self.checkpoints.folder and self.world.broadcast(shards):
            self.sharded_step, self.digests = self.position.step, shards

    def _load_state_dict(self, state: dict[str, Any]) -> None:
        self.networks.load_state_dict(state)
        self.position = Position.from_state_dict(state["position"])
        if state["samples_per_step"] != self.samples_per_step:
            # The number of batches that each rank would have read by now.
            self.position.epoch_steps = self.position.consumed // self.samples_per_step
        self.meter.load_state_dict(state["meter"], self.world)
        self.line_count = state["line_count"]
        self.resumed_from = self.position.step
