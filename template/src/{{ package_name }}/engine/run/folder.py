"""Chooses the run folder, and keeps files that earlier attempts left in it."""

import dataclasses
import logging
import os
import time
from itertools import count
from pathlib import Path
from typing import TypeVar

from ..checkpoint_files import Checkpoints
from ..config import Settings, snapshot
from ..errors import UsageError
from ..filesystem import write_atomically
from ..foreign import read_bytes
from ..ranks.environment import srun_step
from ..ranks.world import World
from .run_lock import newest, origin_of

log = logging.getLogger(__name__)

SettingsT = TypeVar("SettingsT", bound=Settings)


def with_run_dir(settings: SettingsT, world: World) -> SettingsT:
    """Return the settings with `run_dir`, the same on every rank; every rank calls this.

    The folder's name is the Slurm job id, which a requeued job keeps. In a chain of jobs, it is the
    id of the first job. Each task of an array is a separate run. Without Slurm, it is the time.
    If another job had the same id, the time of submission follows it.

    Raises:
        UsageError: `run_dir` is set, so that the tasks of an array would share it.
    """
    if settings.run_dir:
        # Each trial of a sweep has its own folder, and may run in any task of an array.
        trial = "SWEEP_TRIAL" in os.environ
        if int(os.environ.get("SLURM_ARRAY_TASK_COUNT", 1)) > 1 and not trial:
            raise UsageError(
                f"run_dir is {settings.run_dir}, but each task of an array is a separate run: "
                "leave --run-dir out, and use --experiment to keep the runs together"
            )
        return settings
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    # The time has milliseconds, since a loop may start several runs in a second.
    job = os.environ.get("CHAIN_JOB_ID") or os.environ.get("SLURM_JOB_ID")
    name = job or f"{stamp}-{int(now * 1000) % 1000:03}"
    # slurm/stage.sh sets the variable to the number of Slurm steps before the training.
    step = (srun_step(os.environ) or 0) - int(os.environ.get("FIRST_STEP", 0))
    # Ranks that are started again in the same job are another Slurm step of the same run. So the
    # batch script counts its runs in RUN_NUMBER.
    if (number := int(os.environ.get("RUN_NUMBER", step))) > 0:
        # This is a later run in the same allocation. A requeued job counts from zero again.
        name += f".{number}"
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        name = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format_map(os.environ)
    folder = Path(settings.run_root, settings.experiment, name)
    return dataclasses.replace(settings, run_dir=world.on_main(lambda: _own(folder)))


def _own(folder: Path) -> str:
    """Return the folder, with a time in its name if it has a run of another job.

    The numbers of jobs may begin again, and clusters may share a file system.
    """
    last, origin = origin_of(folder), os.environ.get("RUN_ORIGIN", "")
    if last in ("", origin):
        return str(folder)
    log.warning("%s has a run of another job with this number", folder)
    return f"{folder}-{origin.rpartition('-')[2] or int(time.time())}"


def keep_code(folder: Path) -> None:
    """Copy the job's code, which slurm/snapshot.sh has packed, to `code/HASH.tar.gz`."""
    if code := snapshot():
        (folder / "code").mkdir(exist_ok=True)
        packed = (code / "code.tar.gz").read_bytes()
        write_atomically(folder / "code" / f"{code.name}.tar.gz", packed)


def keep_earlier(folder: Path, resume_step: int) -> None:
    """Keep files that this attempt would replace.

    Checkpoints of later steps are moved to `earlier-1`, or the next free number. If this attempt
    starts from step 0, all results are moved there, too. Settings and provenance are copied to
    `attempts/`.
    """
    attempts = folder / "attempts"
    described = [folder / name for name in ("config.yaml", "provenance.json")]
    described = [path for path in described if path.exists()]
    for path in described:
        write_atomically(attempts / f"{newest(attempts) - 1}-{path.name}", read_bytes(path))
    left = Checkpoints(folder / "checkpoints").newer(resume_step)
    if resume_step == 0:
        results = [folder / name for name in ("metrics.jsonl", "summary.json")]
        left += [path for path in results if path.exists() and path.stat().st_size]
        left += described if left else []
    if left:
        aside = next(path for n in count(1) if not (path := folder / f"earlier-{n}").exists())
        for path in left:
            moved = aside / path.relative_to(folder)
            moved.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, moved)
        log.warning("moved files of an earlier attempt in %s to %s", folder, aside.name)
