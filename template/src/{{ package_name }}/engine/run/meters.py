"""What is measured: means over steps and ranks, and a line of JSON for each logged step."""

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from ..filesystem import open_regular, read_lines, write_atomically
from ..ranks.world import World
from .record import RECORDER, record

log = logging.getLogger(__name__)

GIB = 2**30
PROCESS = psutil.Process()


class Meter:
    """Measures training loss, gradient norm, speed and usage of the machine between two log lines.

    What model.py and data.py `record` is read with them.

    Args:
        device: this rank's.
        unit: what weights count, such as "samples" or "tokens".

    Attributes:
        losses: names of the losses, which come first in a line.
        step_seconds: the mean time of a step at the last reading.
        trained_seconds: time of the steps of all attempts, without validations and the saves at
            the end of epochs.
    """

    def __init__(self, device: torch.device, unit: str) -> None:
        self.device, self.rate = device, f"train/{unit}_per_second"
        self.losses: dict[str, None] = {}
        self.weight, self.steps, self.step_seconds = 0, 0, 0.0  # since the last reading
        self.trained_samples, self.trained_weight, self.trained_seconds = 0, 0, 0.0
        self.read_at = self.counted_until = time.perf_counter()

    def add_loss(self, label: str, loss: Tensor, weight: int) -> None:
        """Count the loss of a batch.

        Args:
            label: the prefix of its name, such as "generator_".
            loss: mean over the batch, a scalar.
            weight: of the batch; with 0 its loss does not count.
        """
        self.losses[f"train/{label}loss"] = None
        RECORDER.add(f"train/{label}loss", loss, weight)

    def begin(self) -> None:
        """Count time as trained from now on."""
        self.counted_until = time.perf_counter()

    def count_time(self) -> None:
        """Count the time since the last call, or since `begin`, as trained."""
        before, self.counted_until = self.counted_until, time.perf_counter()
        self.trained_seconds += self.counted_until - before

    def count(self, samples: int, weight: int) -> None:
        """Count a step, by the samples and the weight of all ranks' batches."""
        self.count_time()
        self.steps += 1
        self.weight += weight
        self.trained_samples += samples
        self.trained_weight += weight

    def skip(self, seconds: float) -> None:
        """Leave out time that was not spent on training."""
        self.read_at += seconds
        self.counted_until += seconds

    def read(self, world: World) -> tuple[dict[str, float], dict[str, float]]:
        """Return the metrics over all ranks, and this rank's own; start again from zero.

        Every rank calls this.
        """
        self._record_usage()
        seconds = time.perf_counter() - self.read_at
        speed = self.weight / seconds
        self.step_seconds = seconds / max(self.steps, 1)
        over_all, own = RECORDER.read(world)
        self.weight, self.steps, self.read_at = 0, 0, time.perf_counter()
        losses = {name: over_all[name] for name in self.losses if name in over_all}
        return losses | over_all | {self.rate: speed}, own | {self.rate: speed / world.size}

    def _record_usage(self) -> None:
        """Record memory, processor and GPU; of memory, the largest value of all ranks counts."""
        record("system/memory_gib", PROCESS.memory_info().rss / GIB, "max")
        # Percent of one core, since the last call: four busy threads are 400.
        record("system/cpu_percent", PROCESS.cpu_percent())
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_reserved(self.device)
            record("system/gpu_memory_gib", memory / GIB, "max")
            # Needs the package nvidia-ml-py, and a driver that supports it.
            with suppress(ImportError, RuntimeError, AttributeError):
                record("system/gpu_percent", float(torch.cuda.utilization(self.device)))

    def rates(self) -> dict[str, float]:
        """Return the samples, and their weight, per second of training in all attempts."""
        seconds = max(self.trained_seconds, 1e-9)
        return {
            "samples_per_second": self.trained_samples / seconds,
            self.rate.removeprefix("train/"): self.trained_weight / seconds,
        }

    def state_dict(self, world: World) -> dict[str, Any]:
        """Return what a resumed run must know; every rank calls this."""
        trained = (self.trained_samples, self.trained_weight, self.trained_seconds)
        # Earlier versions of the project read the weight.
        return {"weight": self.weight, "recorded": RECORDER.state_dict(world), "trained": trained}

    def load_state_dict(self, state: Mapping[str, Any], world: World) -> None:
        """Continue from the `state_dict` of an interrupted run."""
        RECORDER.load_state_dict(state["recorded"], world)
        # Checkpoints of earlier versions lack it.
        trained = state.get("trained", (0, 0, 0.0))
        self.trained_samples, self.trained_weight, self.trained_seconds = trained


class JsonLines:
    """`metrics.jsonl`: one JSON object a line, flushed as written; for rank 0.

    Args:
        path: the file.
        resume_step, count: step and number of lines at the checkpoint that the run resumes from.
            Later lines are dropped, since this run writes them again; so is a line that was cut
            off.

    Attributes:
        earlier: the lines that are kept.
        count: the number of lines.
    """

    def __init__(self, path: Path, resume_step: int, count: int | None = None) -> None:
        lines = [line for line in read_lines(path) if line["step"] <= resume_step]
        self.earlier = lines[:count]
        self.count = len(self.earlier)
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.earlier))
        self.file = open_regular(path, "ab", buffering=0)
        self.waiting, self.lock = b"", threading.Lock()

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step; a line that a full disk does not take is written later."""
        self.count += 1
        line = json.dumps({"step": step, "time": round(time, 3), **metrics})
        with self.lock:
            already_logged = bool(self.waiting)
            self.waiting += f"{line}\n".encode()
        try:
            self._write()
        except OSError as error:
            if not already_logged:
                log.error("can't write %s (%s); training goes on", self.file.name, error.strerror)

    def sync(self) -> None:
        """Write all lines to the disk; any thread may call this.

        Raises:
            OSError: some can't be written.
        """
        self._write()
        os.fsync(self.file.fileno())

    def _write(self) -> None:
        with self.lock:
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
