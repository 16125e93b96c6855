"""Measures speed, and writes metrics.jsonl."""

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..filesystem import write_atomically
from ..foreign import open_regular, read_lines
from ..ranks.world import World
from .clock import CLOCK
from .record import LOSS, RECORDER

log = logging.getLogger(__name__)


class Meter:
    """Measures speed, and reads all recorded numbers for a log line.

    Args:
        unit: what the weight of a batch counts, such as "samples" or "tokens".

    Attributes:
        trained_samples, trained_weight: the samples, and their weight, of all steps in all
            attempts, over all ranks.
        trained_seconds: the time of these steps, with the wait for their data.
        seconds, weight: the time of the last step, and its weight over all ranks.
        others: the rates that plug-ins measure, by name.
    """

    def __init__(self, unit: str) -> None:
        self.rate = f"train/{unit}_per_second"
        self.trained_samples, self.trained_weight, self.trained_seconds = 0, 0, 0.0
        self.others: dict[str, float] = {}
        self.until = CLOCK.trained  # steps before this time are counted

    def count(self, samples: int, weight: int) -> None:
        """Count a step with the samples and the weight of all ranks."""
        trained = CLOCK.trained
        self.seconds, self.until, self.weight = trained - self.until, trained, weight
        RECORDER.add(self.rate, weight / self.seconds, self.seconds)
        self.trained_samples += samples
        self.trained_weight += weight
        self.trained_seconds += self.seconds

    def read(self, world: World) -> dict[str, float]:
        """Return the recorded metrics over all ranks, losses first, and reset them.

        Every rank calls this.
        """
        metrics = RECORDER.read(world)
        losses = {name: value for name, value in metrics.items() if LOSS.fullmatch(name)}
        return losses | metrics

    def rates(self) -> dict[str, float]:
        """Return the samples and the weight per second of training, in all attempts, and others."""
        seconds = max(self.trained_seconds, 1e-9)
        return {
            "samples_per_second": self.trained_samples / seconds,
            self.rate.removeprefix("train/"): self.trained_weight / seconds,
            **self.others,
        }

    def state_dict(self, world: World) -> dict[str, Any]:
        """Return the state for a resumed run; every rank calls this."""
        recorded = world.gather(RECORDER.state_dict())
        trained = (self.trained_samples, self.trained_weight, self.trained_seconds)
        return {"recorded": recorded, "trained": trained}

    def load_state_dict(self, state: Mapping[str, Any], world: World) -> None:
        """Continue from the `state_dict` of an interrupted run."""
        RECORDER.load_state_dict(state["recorded"], world)
        samples, weight, seconds = state["trained"]
        self.trained_samples, self.trained_weight = int(samples), int(weight)
        self.trained_seconds = float(seconds)


class JsonLines:
    """Writes `metrics.jsonl`: one JSON object in each line; only rank 0 uses this.

    Args:
        path: the file. A resumed run continues it.
        resume_step: the step of the checkpoint that the run resumes from; 0 for a new run.
        count: the number of lines at the checkpoint. Later lines are removed, since this run writes
            them again. Incomplete lines are removed, too.

    Attributes:
        earlier: the lines of earlier attempts that are kept.
        count: the number of all lines.
    """

    def __init__(self, path: Path, resume_step: int, count: int | None = None) -> None:
        lines = [line for line in read_lines(path) if line["step"] <= resume_step]
        self.earlier = lines[:count]
        self.count = len(self.earlier)
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.earlier))
        # If the disk is full, the buffer keeps the lines, and later writes may succeed.
        self.file = open_regular(path, "ab", buffering=2**20)

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step."""
        self.count += 1
        line = json.dumps({"step": step, "time": round(time, 3), **metrics})
        try:
            self.file.write(f"{line}\n".encode())
            self.file.flush()
        except OSError as error:
            log.error("can't write %s (%s); training goes on", self.file.name, error.strerror)

    def is_in_place(self) -> bool:
        """Return whether the file still has its name."""
        with suppress(OSError):
            return os.path.samestat(os.stat(self.file.name), os.fstat(self.file.fileno()))
        return False

    def sync(self) -> None:
        """Write all lines to the disk; any thread may call this.

        Raises:
            OSError: a line can't be written.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
