"""The run folder: its name, and what earlier attempts left in it."""

import dataclasses
import logging
import os
import time
from pathlib import Path
from typing import TypeVar

from ..checkpoint_files import Checkpoints
from ..config import Settings
from ..errors import UsageError
from ..filesystem import set_aside, write_atomically
from ..ranks.environment import srun_step
from ..ranks.world import World
from .run_lock import newest

log = logging.getLogger(__name__)

Own = TypeVar("Own", bound=Settings)


def with_run_dir(settings: Own, world: World) -> Own:
    """Return the settings with a run folder; every rank calls this and gets the same one.

    A requeued job keeps its id, and so finds its folder again. Each task of an array is a run of
    its own.

    Raises:
        UsageError: all tasks of an array are told to use one folder.
    """
    if settings.run_dir:
        # A sweep gives each trial a folder of its own, whichever task of an array runs it.
        alone = "SWEEP_TRIAL" in os.environ
        if int(os.environ.get("SLURM_ARRAY_TASK_COUNT", 1)) > 1 and not alone:
            raise UsageError(
                f"run_dir is {settings.run_dir}, but each task of an array is a run of its own: "
                "leave --run-dir out, and use --experiment to keep the runs together"
            )
        return settings
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    # Milliseconds: two runs that a loop starts must not share a folder.
    name = os.environ.get("SLURM_JOB_ID", f"{stamp}-{int(now * 1000) % 1000:03}")
    if step := srun_step(os.environ):
        # The second training in one allocation; a requeued job counts its steps from zero again.
        name += f".{step}"
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        name = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format_map(os.environ)
    folder = Path(settings.run_root, settings.experiment, world.broadcast(name))
    return dataclasses.replace(settings, run_dir=str(folder))


def set_aside_earlier(folder: Path, resume_step: int) -> None:
    """Move away what this run would replace, or what a later one would wrongly go on from."""
    left = Checkpoints(folder / "checkpoints").newer(resume_step)
    if resume_step == 0:
        left += [
            path
            for name in ("metrics.jsonl", "summary.json")
            if (path := folder / name).exists() and path.stat().st_size
        ]
    if left and resume_step == 0:
        described = (folder / name for name in ("config.yaml", "provenance.json"))
        left += [path for path in described if path.exists()]
    if left:
        log.warning(
            "moved what an earlier run had left in %s to %s",
            folder,
            set_aside(left, folder).name,
        )


def keep_records(folder: Path) -> None:
    """Keep what the attempt before wrote of itself, as this one will replace it."""
    attempts = folder / "attempts"
    for name in ("config.yaml", "provenance.json"):
        if (path := folder / name).exists():
            kept = attempts / f"{newest(attempts) - 1}-{name}"
            write_atomically(kept, path.read_bytes())
