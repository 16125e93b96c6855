"""Checkpoints written behind the training, which waits for no more than a copy in memory."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks.dtensor import is_dtensor
from ..ranks.world import World
from .store import IN_SHARDS, Checkpoints, KeyPath, each_leaf, name_in_shards, shards_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Saver:
    """Writes one checkpoint at a time, in a thread of its own.

    Rank 0 writes the file; before it, all ranks together write the shards, if they have parts.

    Args:
        checkpoints: where to.
        world: the ranks.
        timeout: seconds that ranks wait for each other while they write.

    Attributes:
        sharded_step: the step whose shards are on disk: of an epoch's last step there are two
            checkpoints, before validation and behind it, with the same parameters.
    """

    def __init__(self, checkpoints: Checkpoints, world: World, timeout: int) -> None:
        self.checkpoints, self.world, self.timeout = checkpoints, world, timeout
        self.sharded_step: int | None = None
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.writing: Future[bool] | None = None
        self.copies: dict[KeyPath, Tensor] = {}

    def go_on_from(self, path: Path, step: int) -> None:
        """Take note of a checkpoint that was resumed from; every rank calls this."""
        own = path.parent == self.checkpoints.folder and shards_of(path).exists()
        self.sharded_step = self.world.broadcast(step if own else None)

    def save(
        self, state: dict[str, Any], step: int, best: bool, before: Callable[[], object]
    ) -> None:
        """Copy the state and start to write it; every rank calls this.

        Waits for the checkpoint before, if that is still being written.

        Args:
            state, step, best: as `Checkpoints.save` takes them; the state may hold parts.
            before: what the thread does before the checkpoint counts; an OSError prevents that.
        """
        self.wait()
        parts: dict[str, Tensor] = {}

        def copy(key_path: KeyPath, leaf: Any) -> Any:  # noqa: ANN401 - whatever a state holds
            if is_dtensor(leaf):
                parts[name_in_shards(key_path)] = self._copied_part(key_path, leaf)
                return IN_SHARDS
            if isinstance(leaf, Tensor):
                return self._copied(key_path, leaf) if self.world.is_main else None
            return leaf

        with torch.no_grad():
            state = each_leaf(copy, state)
        copied = torch.cuda.Event() if self.world.device.type == "cuda" else None
        if copied:
            # The GPU copies before it computes the next step, and only the thread waits for it.
            copied.record()
        self.writing = self.thread.submit(self._write, copied, before, state, parts, step, best)

    def wait(self) -> bool:
        """Wait until nothing is being written; return on rank 0 whether the last one was."""
        return self.writing.result() if self.writing else True

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_failure: object) -> None:
        """Wait, also after an error, and let go of the other ranks."""
        self.wait()
        self.thread.shutdown()
        self.__dict__.pop("mesh", None)

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
        """The ranks' CPUs, whose talk in the thread must not mix with that of the training."""
        from torch.distributed.device_mesh import DeviceMesh

        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self.timeout))
        return DeviceMesh.from_group(group, "cpu")

    def _write(
        self,
        copied: torch.cuda.Event | None,
        before: Callable[[], object],
        state: dict[str, Any],
        parts: dict[str, Tensor],
        step: int,
        best: bool,
    ) -> bool:
        if copied:
            copied.synchronize()
        path = self.checkpoints.path(step)
        folder = Path(f"{shards_of(path)}.tmp")
        try:
            if parts and self.sharded_step != step:
                self._write_shards(folder, parts)
                self.sharded_step = step
            before()
        except (OSError, RuntimeError) as error:
            if self.world.is_main:
                self.checkpoints.complain(path, error)
                if self.sharded_step != step:
                    rmtree(folder, ignore_errors=True)
            return False
        if not self.world.is_main:
            return False
        return self.checkpoints.save(state, step, best, folder if parts else None)

    def _write_shards(self, folder: Path, parts: dict[str, Tensor]) -> None:
        from . import dcp

        if self.world.is_main:
            # What a save left that was killed; other ranks write only after rank 0's plan.
            rmtree(folder, ignore_errors=True)
            with suppress(OSError):
                folder.unlink()  # a link, which would lead the shards elsewhere
        dcp.write(folder, parts, self.mesh.get_group())
