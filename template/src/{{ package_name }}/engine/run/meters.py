"""What is measured: means over steps and ranks, and a line of JSON for each logged step."""

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..filesystem import open_regular, read_lines, write_atomically
from ..ranks.world import World
from .record import STORE
from .system import record_usage

log = logging.getLogger(__name__)


class Meter:
    """Mean training loss, gradient norm, samples per second and the like since the last reading.

    What model.py and data.py `record` is read with them.

    Args:
        device: this rank's.
        unit: what weights count, such as "samples" or "tokens".

    Attributes:
        step_seconds: that a step took, on average, at the last reading.
        losses: names of the losses, which stand first in a line.
        trained_seconds: that the steps of all attempts took; validations and saves at the end of
            epochs are not in it.
    """

    def __init__(self, device: torch.device, unit: str) -> None:
        self.device, self.rate, self.step_seconds = device, f"train/{unit}_per_second", 0.0
        self.weight, self.earlier = 0, 0
        self.steps, self.since = 0, time.perf_counter()
        self.losses: dict[str, None] = {}
        self.trained_samples, self.trained_weight, self.trained_seconds = 0, 0, 0.0
        self.counted = self.since  # until when trained_seconds counts

    def add_loss(self, label: str, loss: Tensor, weight: int) -> None:
        """Count a batch.

        Args:
            label: what the name of its loss begins with, such as "generator_".
            loss: mean over the batch, a scalar.
            weight: of the batch; with 0 its loss does not count.
        """
        self.losses[f"train/{label}loss"] = None
        STORE.add(f"train/{label}loss", loss, weight)

    def begin(self) -> None:
        """Count time as trained from now on."""
        self.counted = time.perf_counter()

    def count_time(self) -> None:
        """Count the time since the last call, or since `begin`, as trained."""
        now = time.perf_counter()
        self.trained_seconds += now - self.counted
        self.counted = now

    def count(self, samples: int, weight: int) -> None:
        """Count a step, by the samples and the weight of all ranks' batches."""
        self.count_time()
        self.weight += weight
        self.steps += 1
        self.trained_samples += samples
        self.trained_weight += weight

    def skip(self, seconds: float) -> None:
        """Leave out time that was not spent on training."""
        self.since += seconds
        self.counted += seconds

    def read(self, world: World) -> tuple[dict[str, float], dict[str, float]]:
        """Return the means over all ranks, and this rank's own; start again from zero.

        Every rank must call this.
        """
        record_usage(STORE, self.device)
        seconds = time.perf_counter() - self.since
        speed = (self.weight - self.earlier) / seconds
        self.step_seconds = seconds / max(self.steps, 1)
        over_all, own = STORE.read(world)
        self.weight, self.earlier = 0, 0
        self.steps, self.since = 0, time.perf_counter()
        losses = {name: over_all[name] for name in self.losses if name in over_all}
        rest = over_all | {self.rate: speed}
        return losses | rest, own | {self.rate: speed / world.size}

    def rates(self) -> dict[str, float]:
        """Return the samples, and their weight, that all attempts trained on in a second."""
        seconds = max(self.trained_seconds, 1e-9)
        return {
            "samples_per_second": self.trained_samples / seconds,
            self.rate.removeprefix("train/"): self.trained_weight / seconds,
        }

    def state_dict(self, world: World) -> dict[str, Any]:
        """Return on rank 0 what a resumed run must know; every rank must call this."""
        trained = (self.trained_samples, self.trained_weight, self.trained_seconds)
        return {"weight": self.weight, "recorded": STORE.state_dict(world), "trained": trained}

    def load_state_dict(self, state: Mapping[str, Any], world: World) -> None:
        """Go on from the `state_dict` of an interrupted run."""
        STORE.load_state_dict(state["recorded"], world)
        # Their time was the interrupted run's.
        self.weight = self.earlier = state["weight"]
        # Checkpoints of earlier versions lack it.
        trained = state.get("trained", (0, 0, 0.0))
        self.trained_samples, self.trained_weight, self.trained_seconds = trained


class JsonLines:
    """`metrics.jsonl`: one JSON object a line, flushed as written; for rank 0.

    Args:
        path: the file.
        resume_step, count: of the checkpoint that the run goes on from, its step and how many
            lines there were. An interrupted run wrote what comes after, and this one will again:
            these lines are dropped, and so is a line that was cut off.

    Attributes:
        earlier: the lines that are kept.
        count: how many lines there are.
    """

    def __init__(self, path: Path, resume_step: int, count: int | None = None) -> None:
        lines = [line for line in read_lines(path) if line["step"] <= resume_step]
        self.earlier = lines[:count]
        self.count = len(self.earlier)
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.earlier))
        self.file = open_regular(path, "ab", buffering=0)
        self.waiting, self.lock = b"", threading.Lock()

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step; what a full disk does not take goes with a later step."""
        self.count += 1
        line = json.dumps({"step": step, "time": round(time, 3), **metrics})
        with self.lock:
            complained = bool(self.waiting)
            self.waiting += f"{line}\n".encode()
        try:
            self._write()
        except OSError as error:
            if not complained:
                log.error("can't write %s (%s); training goes on", self.file.name, error.strerror)

    def sync(self) -> None:
        """Make all lines outlive a power cut, in any thread.

        Raises:
            OSError: some can't be written.
        """
        self._write()
        os.fsync(self.file.fileno())

    def _write(self) -> None:
        with self.lock:
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]

    def close(self) -> None:
        """Close the file."""
        self.file.close()
