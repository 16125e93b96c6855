"""Measures what a run costs and where its time goes: attempts/N-usage.json, the end of the log.

machine.py samples the resources of a rank. costs.py adds them up over ranks and attempts. lines.py
says what they mean.
"""

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...engine import Training
    from .machine import Machine

log = logging.getLogger(__name__)


class Plugin:
    """Samples the usage of each rank. Rank 0 writes the usage of all ranks."""

    machine: "Machine"

    def __init__(self, training: "Training") -> None:
        self.training = training

    def on_start(self, training: "Training") -> None:
        """Begin to sample, and write a first usage, since the run may stop before a sample."""
        from ...engine.data.workers import loading_workers
        from .costs import UsageFile
        from .machine import Machine

        self.machine = Machine(training.world.device)
        self._gather()
        if training.world.is_main:
            workers = loading_workers(training.settings.workers)["num_workers"]
            self.file = UsageFile(Path(training.checkpointing.run_dir), workers)
            self._write()
            self.machine.after = self._write

    def on_log(self, _training: "Training") -> None:
        """Record the usage of memory, CPU and GPU."""
        self.machine.record()

    def on_save(self, _training: "Training") -> None:
        """Collect the usage of all ranks at their last samples: a new one takes milliseconds."""
        self._gather(sampled=True)

    def on_summary(self, training: "Training", summary: dict[str, Any]) -> None:
        """Add the usage of all attempts to summary.json, and log it."""
        self._gather()
        if training.world.is_main:
            summary["usage"] = self._log(finished=True)

    def on_end(self, training: "Training", status: str, _error: BaseException | None) -> None:
        """Log the usage of a run that was stopped or has failed."""
        if status == "preempted":
            self._gather()
        if status != "finished" and training.world.is_main:
            self._log(finished=False)

    def on_close(self, training: "Training", _error: BaseException | None) -> None:
        """End the sampling, and write the usage of the whole attempt."""
        if hasattr(self, "machine"):
            self.machine.close()
            if training.world.is_main:
                self._write()

    def _gather(self, sampled: bool = False) -> None:
        if not sampled:
            self.machine.sample()
        self.ranks = self.training.world.gather(self.machine.describe())

    def _log(self, finished: bool) -> dict[str, Any]:
        """Log and return the usage of all attempts."""
        from .costs import total
        from .lines import lines

        self._write()
        # If the disk is full, only this attempt is known.
        usage = total(self.training.checkpointing.run_dir) or self.file.usage
        for line in lines(usage, finished):
            log.info("%s", line)
        return dataclasses.asdict(usage)

    def _write(self) -> None:
        """Write the usage until now; any thread may call this."""
        from ...engine.run.clock import CLOCK

        self.file.write(self.ranks, self.training.meter.rates(), CLOCK.read())
