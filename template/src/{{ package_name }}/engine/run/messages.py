"""The log lines at the start and at a resume. logging_setup.py sets their prefix."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import Settings, as_submitted
from ..data.steps import StepLoader
from ..errors import printable
from ..ranks import topology
from ..ranks.device import gpu_properties
from ..ranks.world import World

log = logging.getLogger(__name__)


def log_start(settings: Settings, world: World, loader: StepLoader) -> None:
    """Log the ranks, the data and the settings of a run."""
    ranks, how = "one process", ""
    if world.backend:
        ranks = f"{world.size} rank(s) by {world.launcher}"
        how = f", backend {world.backend}, strategy {settings.strategy}"
    hosts = ", ".join(dict.fromkeys(world.hostnames))
    log.info("%s on %s, device %s%s", ranks, hosts, world.device, how)
    if settings.offload and world.size == 1:
        log.warning("offload has no effect on one rank: FSDP shards over several")
    rest = (loader.samples or 0) % (settings.batch_size * world.size) * (not loader.is_stream)
    log.info(
        "%s: %s training samples%s, %d samples a step%s, %d loading worker(s) a rank",
        settings.dataset,
        loader.samples or "an unknown number of",
        f" (an epoch leaves out {rest}, which fill no batch)" if rest else "",
        loader.samples_per_step,
        f", {'about ' * loader.is_stream}{loader.steps} steps an epoch" if loader.steps else "",
        loader.workers,
    )
    if loader.has_state and settings.workers:
        log.info("the training set has a state, so each rank reads it without loading workers")
    source = settings.config and str(as_submitted(settings.config)).removeprefix(f"{Path.cwd()}/")
    source = source or "flags and defaults alone"
    log.info("settings from %s; run folder %s", source, settings.run_dir)
    for rank, far in enumerate(world.gather(topology.far_from(gpu_properties(world.device)))):
        if far and world.is_main:
            who = f"rank {rank} on {world.hostnames[rank]}"
            log.warning("%s: %s: see docs/speed-and-memory.md", who, far)


def log_resume(path: Path, state: Mapping[str, Any], settings: Settings, world: World) -> None:
    """Log which checkpoint the run resumes from, and what has changed since it was saved."""
    position = state["position"]
    log.info("resuming from %s: step %d, epoch %d", path, position["step"], position["epoch"] + 1)
    if not world.is_main:
        return
    if state["world_size"] != world.size:
        log.warning(
            "the checkpoint was saved by %d rank(s), this run has %d: it resumes %s, but not bit "
            "for bit as without the stop",
            state["world_size"],
            world.size,
            "with the training set of each rank that both have (an added rank starts with a new "
            "set, and the set of a missing rank is lost)"
            if state["data"]
            else "at the same sample of the epoch",
        )
    before = state["settings"]
    for name, value in settings.as_dict().items():
        # There is no warning for a setting that the version before did not have.
        expected = name in ("config", "run_dir", "resume", "dry_run", "profile", "profile_ranks")
        if not expected and before.get(name, value) != value:
            was, effect = printable(str(before[name])), ""
            if name in ("epochs", "max_steps"):
                # If a finished run is made longer, its learning rate, which has fallen, rises.
                effect = ": the schedule spans the new length, so the learning rate may go up again"
            log.warning("%s was %s at the checkpoint, now %s%s", name, was, value, effect)
