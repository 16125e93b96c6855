"""Log lines about a run: its start, a resume, and steps that wait for data."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..config import Settings
from ..data.steps import StepLoader
from ..errors import printable
from ..ranks.world import World

log = logging.getLogger(__name__)


def log_start(settings: Settings, world: World, loader: StepLoader, samples_per_step: int) -> None:
    """Log what is about to happen; the number of training samples may be unknown."""
    workers = f", {loader.workers} loading worker(s) a rank" if loader.workers else ""
    several = f", backend {world.backend}, strategy {settings.strategy}" if world.backend else ""
    log.info(
        "%s on %s, device %s%s",
        f"{world.size} rank(s) by {world.launcher}" if world.backend else "one process",
        ", ".join(dict.fromkeys(world.hostnames)),
        world.device,
        several,
    )
    log.info(
        "%s: %s training samples, %d samples a step (%d a rank%s), %d epoch(s)%s, seed %d%s",
        settings.dataset,
        loader.samples or "an unknown number of",
        samples_per_step,
        settings.batch_size,
        f", {settings.accumulate} times" if settings.accumulate > 1 else "",
        settings.epochs,
        f" or {settings.max_steps} steps" if settings.max_steps else "",
        settings.seed,
        workers,
    )
    log.info("settings from %s", settings.config or "flags and defaults alone")
    untouched = " (dry run: not touched)" if settings.dry_run else ""
    log.info("run folder %s%s", settings.run_dir, untouched)


def log_resume(path: Path, state: Mapping[str, Any], settings: Settings, world: World) -> None:
    """Log which checkpoint the run goes on from, and what is not as it was there."""
    position = state["position"]
    log.info("resuming from %s: step %d, epoch %d", path, position["step"], position["epoch"] + 1)
    if not world.is_main:
        return
    if state["world_size"] != world.size:
        log.warning(
            "the checkpoint is of %d rank(s), this run has %d: it goes on behind as many "
            "samples of the epoch, but not bit for bit as without the stop",
            state["world_size"],
            world.size,
        )
    before = state["settings"]
    own = ("config", "run_dir", "resume", "dry_run")
    for name, value in settings.as_dict().items():
        # What an earlier version did not know is not worth a warning.
        if name not in own and before.get(name, value) != value:
            log.warning(
                "%s was %s at the checkpoint, now %s", name, printable(str(before[name])), value
            )


class DataWait:
    """Logs once that steps wait for their samples, if that is most of their time.

    Args:
        workers: processes that load; if they were chosen, nothing is logged.
    """

    def __init__(self, workers: int | Literal["auto"]) -> None:
        self.first, self.logged = True, workers != 0

    def look(self, data_seconds: float, step_seconds: float) -> None:
        """Look at how long a step waited, and how long it took, on average."""
        share = data_seconds / step_seconds
        # The first step starts a lot, so the first reading says little.
        if share > 0.5 and not self.logged and not self.first:
            log.info("steps wait for data for %.0f %% of their time: --workers auto?", 100 * share)
            self.logged = True
        self.first = False
