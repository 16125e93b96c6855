"""What a run leaves behind, and what it shows meanwhile."""

import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from . import provenance
from .checkpoint import write_atomically
from .config import Settings
from .distributed import World
from .errors import UsageError
from .launcher import FIRST_SPECIAL_STEP
from .metrics import JsonLines
from .tracking import Run, Status, Trackers

log = logging.getLogger(__name__)


def with_run_dir(settings: Settings, world: World) -> Settings:
    """Return the settings with a run folder; every rank calls this and gets the same one.

    A requeued job keeps its id, and so finds its folder again. Each task of an array is a run of
    its own.

    Raises:
        UsageError: all tasks of an array are told to use one folder.
    """
    if settings.run_dir:
        if int(os.environ.get("SLURM_ARRAY_TASK_COUNT", 1)) > 1:
            raise UsageError(
                f"run_dir is {settings.run_dir}, but each task of an array is a run of its own: "
                "leave --run-dir out, and use --experiment to keep the runs together"
            )
        return settings
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    # Milliseconds: two runs that a loop starts must not share a folder.
    name = os.environ.get("SLURM_JOB_ID", f"{stamp}-{int(now * 1000) % 1000:03}")
    step = int(os.environ.get("SLURM_STEP_ID", 0))
    if 0 < step < FIRST_SPECIAL_STEP:
        # The second training in one allocation; a requeued job counts its steps anew.
        name += f".{step}"
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        name = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format_map(os.environ)
    folder = Path(settings.run_root, settings.experiment, world.share(name))
    return dataclasses.replace(settings, run_dir=str(folder))


class Report:
    """The run folder, the trackers and the progress bar of rank 0.

    On other ranks every call does nothing, so the loop need not ask which it is on.

    Args:
        settings: the effective settings, with a run folder.
        world: the ranks.
        trackers: names of the trackers to use.
        resume_step: the step that this attempt goes on from.
        run_ids: the trackers' ids of the run so far.

    Raises:
        UsageError: the run folder can't be written to.
    """

    def __init__(
        self,
        settings: Settings,
        world: World,
        trackers: list[str],
        resume_step: int,
        run_ids: Mapping[str, str],
    ) -> None:
        self.active = world.is_main
        self.run_ids = dict(run_ids)
        self.folder = Path(str(settings.run_dir))
        world.on_main(lambda: self._open(settings, world, resume_step))
        if self.active:
            run = Run(
                directory=self.folder,
                name=f"{settings.experiment}/{self.folder.name}",
                experiment=settings.experiment,
                settings=settings.as_dict(),
                tags=settings.tags,
                resume_step=resume_step,
            )
            self.trackers = Trackers(trackers, run, run_ids)
            self.run_ids = self.trackers.run_ids

    def _open(self, settings: Settings, world: World, resume_step: int) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write("config.yaml", yaml.safe_dump(settings.as_dict(), sort_keys=False))
            self._write("provenance.json", json.dumps(provenance.collect(world), indent=2))
            self.lines = JsonLines(self.folder / "metrics.jsonl", resume_step)
        except OSError as error:
            raise UsageError(
                f"can't write to the run folder {self.folder}: {error.strerror}; choose another "
                "with --run-dir or --run-root"
            ) from None

    def progress_bar(self, epoch: int, done: int, total: int | None) -> tqdm:
        """Return a bar over the steps of an epoch: shown on a terminal, silent in a log file."""
        return tqdm(
            desc=f"epoch {epoch + 1}",
            initial=done,
            total=total,
            unit="step",
            leave=False,
            disable=not (self.active and sys.stderr.isatty()),
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record and log the numbers of a step."""
        if self.active:
            self.lines.write(step, values)
            self.trackers.log_metrics(values, step)
            shown = "  ".join(f"{name} {value:.5g}" for name, value in values.items())
            with tqdm.external_write_mode():
                log.info("step %d  %s", step, shown)

    def flush(self) -> None:
        """Make what was recorded so far outlive the process."""
        if self.active:
            self.trackers.flush()

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json and log it."""
        if self.active:
            try:
                self._write("summary.json", json.dumps(values, indent=2))
            except OSError as error:
                raise UsageError(
                    f"can't write {self.folder / 'summary.json'}: {error.strerror}; make room, and "
                    "the same command goes on from the newest checkpoint"
                ) from None
            log.info(
                "test accuracy %.2f %%, test loss %.4f; all of it in %s",
                100 * values["test_accuracy"],
                values["test_loss"],
                self.folder / "summary.json",
            )

    def close(self, status: Status) -> None:
        """End the run in the trackers, and close the files."""
        if self.active:
            self.trackers.finish(status)
            self.lines.close()

    def _write(self, name: str, text: str) -> None:
        write_atomically(self.folder / name, text + "\n")
