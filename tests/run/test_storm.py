"""A training that is disturbed at random moments and restarted ends like an undisturbed one.

    STORM=500 STORM_SEED=7 pytest tests/run/test_storm.py --log-cli-level=INFO

This disturbs each training 500 times. The default is a few times, with a new seed in each run.
"""

import json
import logging
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from metrics import reproducible

from .conftest import Job, command, srun, torchrun
from .storm import Faults, Storm
from .trackers import TRACKERS, check_numbers, show

HITS = os.environ.get("STORM")
SEED = int(os.environ.get("STORM_SEED", random.SystemRandom().randrange(10**6)))
FLAGS = (
    *("--max-steps=60", "--epochs=2", "--batch-size=128", "--log-every=3"),
    *("--checkpoint-every=7", "--trackers=tensorboard", "--timeout=120", "--meet-timeout=60"),
    "--experiment=storm",
)
log = logging.getLogger(__name__)


@pytest.mark.parametrize(
    ("name", "hits"),
    [
        ("ddp", 3),
        pytest.param("fsdp", 2, marks=pytest.mark.slow),
        pytest.param("stream", 2, marks=pytest.mark.slow),
        pytest.param("torchrun", 1, marks=pytest.mark.slow),
        ("faults", 2),
        pytest.param("trackers", 3, marks=pytest.mark.slow),
    ],
)
def test_a_storm_changes_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, hits: int
) -> None:
    root = request.getfixturevalue("full_project" if name == "trackers" else "project")
    faults = None
    if name == "faults":
        if not shutil.which("gcc"):
            pytest.skip("gcc is missing: run scripts/install-slurm.sh")
        faults = Faults(tmp_path)

    def start(run_dir: Path) -> Job:
        match name:
            case "ddp":
                return srun(root, run_dir, 2, *FLAGS, "--ema=0.9")
            case "fsdp":
                return srun(root, run_dir, 3, *FLAGS, "--strategy=fsdp")
            case "stream":
                return srun(root, run_dir, 2, *FLAGS, "--streaming", "--workers=2")
            case "torchrun":
                return torchrun(root, run_dir, 1, 2, *FLAGS)
            case "trackers":
                flags = (*FLAGS, f"--run-root={tmp_path}", "--trackers", *TRACKERS)
                return srun(root, run_dir, 2, *flags, STEP_SECONDS="0.1")
            case _:
                faults.below = run_dir
                return srun(root, run_dir, 2, *FLAGS, **faults.environment)

    began = time.monotonic()
    whole = start(tmp_path / "storm/whole").wait()
    check_trackers(whole, name)
    seconds = time.monotonic() - began
    seed = f"{SEED} {name}"
    chance = random.Random(seed)
    left, run, ends = int(HITS or hits), 0, Counter[tuple[int, ...]]()
    while left:
        run += 1
        run_dir = tmp_path / "storm" / str(run)
        storm = Storm(lambda folder=run_dir: start(folder), seconds, chance, faults)
        job, left = storm.hit(left)
        log.info("seed %s, run %d, %d hits left:\n%s", seed, run, left, storm)
        where = f"seed {seed}, run {run}:\n{storm}\n{job.log}"
        assert job.codes and not any(job.codes), where
        ends += storm.ends
        assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"], where
        assert reproducible(job.metrics()) == reproducible(whole.metrics()), where
        if json.loads((run_dir / "status.json").read_text()).get("missed_by"):
            log.info(sent := command(root, "sync", str(run_dir)).stderr)
            assert "has all data" in sent, where
        check_trackers(job, name)
    log.info("seed %s: %d runs ended by %s", seed, run, dict(ends))


def check_trackers(job: Job, name: str) -> None:
    """Each tracker shows what metrics.jsonl has, each number once."""
    for tracker in TRACKERS if name == "trackers" else ["tensorboard"]:
        check_numbers(show(tracker, job.run_dir), job.run_dir)
