"""A training that tests stop, and checks that it ends like a training without a stop."""

import re
from pathlib import Path

import pytest
import torch
from metrics import reproducible
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .jobs import Job, Project

# A rank on each of two nodes, four epochs of 117 steps.
ON_TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
TRAINING = ("--dataset=synthetic", "--epochs=4", "--batch-size=64", "--log-every=1")
STEPS = 4 * 117
# With these variables, users filter and format what Slurm's commands print.
FILTERS = {
    "SQUEUE_STATES": "PENDING",
    "SQUEUE_USERS": "nobody",
    "SQUEUE_PARTITION": "none",
    "SQUEUE_NAMES": "none",
    "SINFO_PARTITION": "none",
    "SCONTROL_CLUSTER": "none",
    "SCANCEL_NAME": "none",
    "SLURM_TIME_FORMAT": "relative",
}
both_launchers = pytest.mark.parametrize(
    "launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.slow)]
)


def submit(project: Project, *options: str, flags: tuple[str, ...] = (), **env: str) -> Job:
    """Submit the training that a test will stop."""
    flags = (*TRAINING, "--checkpoint-every=20", *flags)
    # The scripts for torchrun read the number of ranks on a node from this variable.
    env = {"RANKS_PER_NODE": "1", **env}
    return project.sbatch(*ON_TWO_NODES, *options, "slurm/train_cpu.sbatch", *flags, **env)


def suspend(job: Job) -> Job:
    """Suspend the ranks, so that the training can't finish before Slurm stops it.

    Slurm resumes suspended processes before it ends them.
    """
    for rank in job.ranks().values():
        rank.suspend()
    return job


def check_same(job: Job, uninterrupted: Job, most_restarts: int = 1) -> None:
    """Check that a job was requeued, and that it ended like the uninterrupted job."""
    check_end(job, uninterrupted)
    assert job.summary["resumed_from_step"] > 0
    assert 1 <= job.restarts <= most_restarts, job.log


def check_end(job: Job, uninterrupted: Job) -> None:
    """Check that a job has the same results as the uninterrupted job."""
    assert job.summary["parameters_sha256"] == uninterrupted.summary["parameters_sha256"]
    assert job.summary["test_accuracy"] == uninterrupted.summary["test_accuracy"]
    assert "Traceback" not in job.log
    numbers = [reproducible(each.metrics()) for each in (job, uninterrupted)]
    assert numbers[0] == numbers[1], "the steps of metrics.jsonl differ"
    mine = re.compile(rf"{job.id}(\D.*)?")
    assert [path for path in job.run_dir.parent.iterdir() if mine.fullmatch(path.name)] == [
        job.run_dir
    ]
    assert [path.name for path in job.run_dir.rglob("tensorboard*")] == ["tensorboard"]
    events = EventAccumulator(str(job.run_dir / "tensorboard"), size_guidance={"scalars": 0})
    logged = [event.step for event in events.Reload().Scalars("train/loss")]
    assert logged == list(range(1, STEPS + 1))
    check_checkpoints(job.run_dir / "checkpoints")


def check_checkpoints(folder: Path) -> None:
    """Check that `latest` names a complete checkpoint, and that no incomplete one is left."""
    latest = folder / (folder / "latest").read_text()
    assert torch.load(latest, weights_only=True)["position"]["step"] > 0
    assert not list(folder.glob("*.tmp"))
