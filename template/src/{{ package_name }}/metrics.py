"""What is measured: means over steps and ranks, and a line of JSON for each logged step."""

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .distributed import World
from .files import read_lines, write_atomically
from .recording import STORE
from .system import record_usage

log = logging.getLogger(__name__)


class Meter:
    """Mean training loss, gradient norm, images per second and the like since the last reading.

    What model.py and data.py `record` is read with them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples, self.earlier, self.since = 0, 0, time.perf_counter()

    def add(self, loss: Tensor, norm: Tensor | None, own_samples: int, samples: int) -> None:
        """Count a step.

        Args:
            loss: sum over this rank's samples, a scalar.
            norm: of the gradient, which all ranks share; None where it was not worked out.
            own_samples, samples: of this rank, and of all ranks.
        """
        STORE.add("train/loss", loss, own_samples)
        if norm is not None:
            STORE.add("train/gradient_norm", norm, 1)
        self.samples += samples

    def skip(self, seconds: float) -> None:
        """Leave out time that was not spent on training."""
        self.since += seconds

    def read(self, world: World) -> tuple[dict[str, float], dict[str, float]]:
        """Return the means over all ranks, and this rank's own; begin anew.

        Every rank must call this.
        """
        record_usage(STORE, self.device)
        speed = (self.samples - self.earlier) / (time.perf_counter() - self.since)
        over_all, own = STORE.read(world)
        self.samples, self.earlier, self.since = 0, 0, time.perf_counter()
        first = {"train/loss": over_all["train/loss"], "train/images_per_second": speed}
        return first | over_all, {"train/images_per_second": speed / world.size} | own

    def state(self, world: World) -> dict[str, Any]:
        """Return on rank 0 what a resumed run must know; every rank must call this."""
        return {"samples": self.samples, "recorded": STORE.state(world)}

    def resume(self, state: Mapping[str, Any], world: World) -> None:
        """Go on from the `state` of an interrupted run."""
        recorded = state["recorded"]
        # A checkpoint of an earlier version has the sums of all ranks.
        STORE.resume([recorded] if isinstance(recorded, Mapping) else recorded, world)
        # Their time was the interrupted run's.
        self.samples = self.earlier = state["samples"]


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
        self.file = path.open("ab", buffering=0)
        self.waiting = b""

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step; what a full disk does not take goes with a later step."""
        self.count += 1
        complained = bool(self.waiting)
        self.waiting += json.dumps({"step": step, "time": round(time, 3), **metrics}).encode()
        self.waiting += b"\n"
        try:
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
        except OSError as error:
            if not complained:
                log.error("can't write %s (%s); training goes on", self.file.name, error.strerror)

    def close(self) -> None:
        """Close the file."""
        self.file.close()
