"""A job that is disturbed at random moments is requeued, and ends like an undisturbed one.

STORM=50 STORM_SEED=7 pytest tests/slurm/test_storm.py --log-cli-level=INFO
"""

import logging
import os
import random
import signal
import time
from contextlib import suppress

import metrics
import psutil
import pytest

from .cluster import wait_for
from .jobs import ENDED, Job, Project
from .trainings import check_end, submit

HITS = int(os.environ.get("STORM", 4))
SEED = int(os.environ.get("STORM_SEED", random.SystemRandom().randrange(10**6)))
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGKILL)
log = logging.getLogger(__name__)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
@pytest.mark.slow
def test_a_storm_changes_nothing(
    projects: dict[str, Project],
    uninterrupted: Job,
    launcher: str,
) -> None:
    chance, told, left = random.Random(f"{SEED} {launcher}"), [f"seed {SEED}"], HITS
    while left:
        job = submit(projects[launcher], MAX_REQUEUES="1000")
        while left and come_to_a_moment(job, chance):
            left -= 1
            told.append(f"job {job.id}: {hit(job, chance)}")
        told.append(f"job {job.id}: {job.wait().state} after {job.restarts} restarts")
        log.info("\n".join(told))
        assert job.state == "COMPLETED", "\n".join([*told, job.log])
        check_end(job, uninterrupted)


def come_to_a_moment(job: Job, chance: random.Random) -> bool:
    """Return at a random moment after its ranks have started; False if the job has ended."""
    wait_for(lambda: job.state in ENDED or job.ranks(), lambda: job.log)
    until = time.monotonic() + chance.uniform(0, 15)
    wait_for(lambda: job.state in ENDED or time.monotonic() > until, lambda: job.log)
    return job.state not in ENDED


def hit(job: Job, chance: random.Random) -> str:
    """Do something to a job; return what."""
    cluster, number = job.project.cluster, chance.choice(SIGNALS)
    step = metrics.last_step(job.run_dir)
    kind = chance.choice(["rank", "ranks", "scancel", "requeue", "shell", "pause"])
    ranks = list(job.ranks().values())
    with suppress(psutil.NoSuchProcess, IndexError, ValueError):
        if kind == "rank":
            chance.choice(ranks).send_signal(number)
        elif kind == "ranks":
            for rank in ranks:
                rank.send_signal(number)
        elif kind == "scancel":
            number = chance.choice(SIGNALS[:2])
            cluster.run("scancel", f"--signal={number.name[3:]}", job.id, check=False)
        elif kind == "requeue":
            cluster.run("scontrol", "requeue", job.id, check=False)
        elif kind == "shell":
            job.batch_shell().kill()
        else:
            rank = chance.choice(ranks)
            rank.suspend()
            time.sleep(chance.uniform(0, 3))
            rank.resume()
    return f"{kind} {number.name} at step {step}"
