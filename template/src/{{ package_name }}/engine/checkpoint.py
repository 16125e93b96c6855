"""Saves checkpoints in the background, and resumes runs from them."""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from .checkpoint_files import (
    IN_SHARDS,
    Checkpoints,
    check_readable,
    each_leaf,
    fitting,
    load,
    part_name,
)
from .config import Settings
from .data.steps import StepLoader
from .errors import UsageError
from .filesystem import remove, write_atomically
from .networks import Networks
from .position import Position
from .ranks.strategy import is_dtensor, parameter_norm
from .ranks.world import World
from .run.clock import CLOCK
from .run.messages import log_resume
from .run.meters import Meter

log = logging.getLogger(__name__)


class Checkpointing:
    """Saves everything that a resumed run needs, in the background, and restores it.

    Rank 0 writes the .pt file. With FSDP, all ranks together write the shards before that. The
    state of random generators is not saved, since they are seeded for each step and each sample.

    Args:
        loader: of the training set, whose state is saved if it has one.

    Attributes:
        position: how far the training is.
        line_count: the number of lines that metrics.jsonl had at the checkpoint; None if the run
            did not resume.
        resumed_from: the step of the checkpoint; None if the run did not resume.
        plugins: what plug-ins keep in the checkpoint, by their names.
    """

    def __init__(
        self,
        networks: Networks,
        meter: Meter,
        settings: Settings,
        world: World,
        loader: StepLoader,
    ) -> None:
        self.networks, self.meter, self.settings, self.world = networks, meter, settings, world
        self.described = settings.as_dict()  # once, since it takes as long as a step
        self.loader, self.samples_per_step = loader, loader.samples_per_step
        self.run_dir = Path(str(settings.run_dir))
        folder = self.run_dir / "checkpoints"
        self.checkpoints = Checkpoints(folder, settings.keep_checkpoints, settings.keep_every)
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.writing: Future[bool] | None = None
        self.copies: dict[tuple, Tensor] = {}
        self.position = Position()
        self.line_count: int | None = None
        self.resumed_from: int | None = None
        self.plugins: dict[str, Any] = {}
        self.group: Any = None  # a process group that only the background thread uses

    @CLOCK.during("checkpoints")
    def save(self, line_count: int | None, before: Callable[[], object], best: bool) -> None:
        """Copy the state to CPU memory and start to write it; every rank calls this.

        If the last checkpoint is still being written, wait for it first.

        Args:
            line_count: the number of lines in metrics.jsonl so far.
            before: a function that is called in the background before the checkpoint is written. If
                it raises OSError, the checkpoint is not written.
            best: whether this is the best checkpoint so far.

        Raises:
            UsageError: on every rank, if a parameter is not finite: the training has diverged.
        """
        norm = parameter_norm(self.networks.modules.values()).item()
        self.check_finite("the norm of all parameters is", norm)
        state: dict[str, Any] = {
            **self.networks.state_dict(),
            "position": self.position.state_dict(),
            "meter": self.meter.state_dict(self.world),
            "data": self.world.collect(data) if (data := self.loader.state_dict()) else None,
            "plugins": self.plugins,
            "line_count": line_count,
            "world_size": self.world.size,
            "samples_per_step": self.samples_per_step,
            "settings": self.described,
        }
        self.start_writing(state, self.position.step, best, before)

    def start_writing(
        self, state: dict[str, Any], step: int, best: bool, before: Callable[[], object]
    ) -> None:
        """Copy a state to CPU memory and write it in the background, as `save` does.

        Raises:
            UsageError: on every rank, if the state could not be read again.
        """
        self.wait()
        parts: dict[str, Tensor] = {}

        def copied(key_path: tuple, leaf: Any) -> Any:  # noqa: ANN401 - whatever a state holds
            if is_dtensor(leaf):
                parts[part_name(key_path)] = self._copied(key_path, leaf)
                return IN_SHARDS
            if isinstance(leaf, Tensor):
                return self._copied(key_path, leaf) if self.world.is_main else None
            # A schedule made with NumPy gives its numbers, which torch refuses to load.
            return leaf.item() if isinstance(leaf, numpy.generic) else leaf

        with torch.no_grad():
            state = each_leaf(copied, state)
        if not self.writing:  # this is the first save
            rest = each_leaf(lambda _, leaf: None if isinstance(leaf, Tensor) else leaf, state)
            self.world.on_main(partial(check_readable, rest))
        # At the end of an epoch, a step is saved twice, but its shards only once.
        if parts and self.world.on_main(lambda: self.checkpoints.shard_digests(step)):
            parts = {}
        if parts and not self.group:  # made here, since all ranks make it together
            timeout = timedelta(seconds=self.settings.timeout)
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        done = torch.cuda.Event() if self.world.device.type == "cuda" else None
        began = time.perf_counter()
        if done:
            # The GPU copies before it computes the next step. Only the thread waits for the copies.
            done.record()

        def write() -> bool:
            if done:
                done.synchronize()
            path = self.checkpoints.path(step)
            folder = path.with_suffix(".shards.tmp")
            digests: list[str] = []
            try:
                if parts:
                    from . import shards

                    digests = shards.write(folder, parts, self.group)
                before()
                if self.world.is_main:
                    self.checkpoints.write(state, step, best, digests)
                    took = f"{time.perf_counter() - began:.1f}\n"  # for doctor
                    with suppress(OSError):
                        write_atomically(self.checkpoints.folder / "save_seconds", took)
            # torch may raise RuntimeError in place of an OSError.
            except (OSError, RuntimeError, UsageError) as error:
                reason = str(error).splitlines()[0]
                if self.world.is_main:
                    log.error("could not write %s (%s); training goes on", path, reason)
                    remove(folder)
                return False
            return True

        self.writing = self.thread.submit(write)

    def wait(self) -> bool:
        """Wait until no checkpoint is being written; return whether the last one was written."""
        return self.writing.result() if self.writing else True

    def close(self) -> None:
        """Wait for the last checkpoint, also after an error, and end the background thread."""
        self.wait()
        self.thread.shutdown()
        self.group = None

    def check_finite(self, what: str, value: float) -> None:
        """Raise UsageError if a value, which is the same on every rank, is not finite."""
        if not math.isfinite(value):
            raise UsageError(
                f"{what} {value} at step {self.position.step}, so no checkpoint is saved: lower "
                "lr, lengthen warmup, or set clip_norm"
            )

    @CLOCK.during("checkpoints")
    def check_saved(self, what: str) -> None:
        """Wait for the last checkpoint; raise UsageError on every rank if it was not written."""
        if not self.world.broadcast(self.wait()):
            raise UsageError(
                f"{what} at step {self.position.step}, but the checkpoint could not be written: "
                f"make room for {self.checkpoints.folder}, and run the same command again"
            )

    def _copied(self, key_path: tuple, tensor: Tensor) -> Tensor:
        """Return a copy on the CPU, which reuses the memory of the previous copy."""
        copy = self.copies.get(key_path)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            # Of a DTensor, this is a DTensor whose part is on the CPU.
            copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self.copies[key_path] = copy
        return copy.copy_(tensor, non_blocking=tensor.is_cuda)

    def resume(self, path: Path) -> None:
        """Load a checkpoint; every rank calls this.

        Raises:
            UsageError: on every rank, if one of them can't read it, or it does not fit.
        """
        state, error = {}, None
        try:
            state = load(path, self.networks.layouts())
        except UsageError as caught:
            error = caught
        for each in self.world.gather(error):
            if each:
                raise each
        with fitting(path):
            self.networks.load_state_dict(state)
            self.position = Position.from_state_dict(state["position"])
            if state["samples_per_step"] != self.samples_per_step:
                # The steps that these samples would have taken with the new size of a step.
                self.position.epoch_steps = self.position.consumed // self.samples_per_step
            self.meter.load_state_dict(state["meter"], self.world)
            if data := state["data"]:  # of each rank
                self.loader.load_state_dict(dict(enumerate(data)).get(self.world.rank))
            self.plugins = dict(state["plugins"])
            if not isinstance(state["line_count"], int | None):
                raise TypeError(f"line_count is a {type(state['line_count']).__name__}")
            self.line_count, self.resumed_from = state["line_count"], self.position.step
            log_resume(path, state, self.settings, self.world)
