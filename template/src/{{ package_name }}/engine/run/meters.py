"""What is measured: means over steps and ranks, and a line of JSON for each logged step."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..filesystem import open_regular, read_lines, write_atomically
from ..ranks.world import World
from .clock import CLOCK
from .machine import GIB, PROCESS, Machine
from .record import LOSS, RECORDER, record
from .slow_ranks import SlowRanks
from .usage import Rank

log = logging.getLogger(__name__)


class Meter:
    """Measures speed and usage of the machine, and reads all that was recorded for a log line.

    Args:
        device: this rank's.
        unit: what weights count, such as "samples" or "tokens".

    Attributes:
        trained_seconds: time of the steps of all attempts, and of the wait for their data.
        slow: the ranks that compute more slowly than the others.
        machine: what this rank uses. ranks: what each rank had used at the last checkpoint.
    """

    def __init__(self, device: torch.device, unit: str) -> None:
        self.device, self.rate = device, f"train/{unit}_per_second"
        self.trained_samples, self.trained_weight, self.trained_seconds = 0, 0, 0.0
        self.slow, self.machine = SlowRanks(), Machine(device)
        PROCESS.cpu_percent()  # the first answer is always 0
        self.ranks: list[Rank] = []
        self.until = CLOCK.trained  # the steps until then

    def count(self, samples: int, weight: int) -> float:
        """Count a step, by the samples and the weight of all ranks' batches; return its seconds."""
        trained = CLOCK.trained
        seconds, self.until = trained - self.until, trained
        RECORDER.add(self.rate, weight / seconds, seconds)
        self.trained_samples += samples
        self.trained_weight += weight
        self.trained_seconds += seconds
        return seconds

    def read(self, world: World) -> dict[str, float]:
        """Return the metrics over all ranks, losses first, and start again from zero.

        Every rank calls this.
        """
        self._record_usage()
        metrics = RECORDER.read(world)
        self.slow.compare(RECORDER.of_ranks, world)
        losses = {name: value for name, value in metrics.items() if LOSS.fullmatch(name)}
        return losses | metrics

    def _record_usage(self) -> None:
        """Record memory, processor and GPU; of memory, the largest value of all ranks counts."""
        record("system/memory_gib", PROCESS.memory_info().rss / GIB, "max")
        # Percent of one core, since the last call: four busy threads are 400.
        record("system/cpu_percent", PROCESS.cpu_percent())
        if self.machine.gpu:
            memory = self.machine.gpu.max_memory_reserved(self.device)
            record("system/gpu_memory_gib", memory / GIB, "max")
        if (percent := self.machine.gpu_percent()) is not None:
            record("system/gpu_percent", percent)

    def gather(self, world: World) -> None:
        """Learn what each rank has used until now; every rank calls this."""
        self.machine.sample()
        self.ranks = world.gather(self.machine.describe())

    def rates(self) -> dict[str, float]:
        """Return the samples, and their weight, per second of training in all attempts."""
        seconds = max(self.trained_seconds, 1e-9)
        return {
            "samples_per_second": self.trained_samples / seconds,
            self.rate.removeprefix("train/"): self.trained_weight / seconds,
        }

    def state_dict(self, world: World) -> dict[str, Any]:
        """Return what a resumed run must know; every rank calls this."""
        state = world.gather((RECORDER.state_dict(), self.machine.describe()))
        recorded, self.ranks = map(list, zip(*state, strict=True))
        trained = (self.trained_samples, self.trained_weight, self.trained_seconds)
        return {"recorded": recorded, "trained": trained}

    def load_state_dict(self, state: Mapping[str, Any], world: World) -> None:
        """Continue from the `state_dict` of an interrupted run."""
        RECORDER.load_state_dict(state["recorded"], world)
        samples, weight, seconds = state["trained"]
        self.trained_samples, self.trained_weight = int(samples), int(weight)
        self.trained_seconds = float(seconds)


class JsonLines:
    """`metrics.jsonl`: one JSON object a line, flushed as written; for rank 0.

    Args:
        resume_step, count: step and number of lines at the checkpoint that the run resumes from.
            Later lines are dropped, since this run writes them again; so is a line that was cut
            off.

    Attributes:
        earlier: the lines that are kept. count: the number of all lines.
    """

    def __init__(self, path: Path, resume_step: int, count: int | None = None) -> None:
        lines = [line for line in read_lines(path) if line["step"] <= resume_step]
        self.earlier = lines[:count]
        self.count = len(self.earlier)
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in self.earlier))
        # The buffer keeps what a full disk does not take, and writes it later.
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

    def sync(self) -> None:
        """Write all lines to the disk; any thread may call this.

        Raises:
            OSError: some can't be written.
        """
        self.file.flush()
        os.fsync(self.file.fileno())
