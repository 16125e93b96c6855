"""What is measured: means over steps and ranks, and a line of JSON for each logged step."""

import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import write_atomically
from .distributed import World

log = logging.getLogger(__name__)


class Meter:
    """Mean training loss, gradient norm and images per second since the last reading.

    Sums stay on the device, so that no step waits for a number.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self.sums = torch.zeros(2, device=self.device)
        self.samples, self.steps = 0, 0
        self.earlier, self.since = 0, time.perf_counter()

    def add(self, loss: Tensor, norm: Tensor | None, samples: int) -> None:
        """Count a step: summed loss of this rank's samples, gradient norm, samples of all ranks."""
        self.sums += torch.stack([loss, loss.new_zeros(()) if norm is None else norm])
        self.samples += samples
        self.steps += 1

    def skip(self, seconds: float) -> None:
        """Leave out time that was not spent on training."""
        self.since += seconds

    def read(self, world: World) -> dict[str, float]:
        """Return the means over all ranks and begin anew; every rank must call this."""
        loss, norm, samples, steps = self.total(world)
        seconds, earlier = time.perf_counter() - self.since, self.earlier
        self.restart()
        speed = (samples - earlier) / seconds
        readings = {"train/loss": loss / samples, "train/images_per_second": speed}
        return {**readings, "train/gradient_norm": norm / steps} if norm else readings

    def total(self, world: World) -> list[float]:
        """Return loss over all ranks, norms, samples and steps; every rank must call this."""
        loss, norm = self.sums.tolist()
        return [*world.sum([loss]), norm, self.samples, self.steps]

    def resume(self, total: list[float], world: World) -> None:
        """Go on from the `total` of an interrupted run."""
        loss, norm, samples, steps = total
        self.restart()
        self.sums += torch.tensor([loss if world.is_main else 0.0, norm], device=self.device)
        self.samples, self.steps = int(samples), int(steps)
        self.earlier = self.samples  # whose time was the interrupted run's


class JsonLines:
    """`metrics.jsonl`: one JSON object a line, flushed as written; for rank 0.

    Args:
        path: the file.
        resume_step: lines after this step are dropped, since an interrupted run wrote them after
            its last checkpoint; so is a line that was cut off.
    """

    def __init__(self, path: Path, resume_step: int) -> None:
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                if json.loads(line)["step"] <= resume_step:
                    kept.append(line + "\n")
            except ValueError:
                continue
        write_atomically(path, "".join(kept))
        self.file = path.open("ab", buffering=0)
        self.waiting = b""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step; what a full disk does not take goes with a later step."""
        complained = bool(self.waiting)
        self.waiting += json.dumps({"step": step, **metrics}).encode() + b"\n"
        try:
            while self.waiting:
                self.waiting = self.waiting[self.file.write(self.waiting) :]
        except OSError as error:
            if not complained:
                log.error("can't write %s (%s); training goes on", self.file.name, error.strerror)

    def close(self) -> None:
        """Close the file."""
        self.file.close()
