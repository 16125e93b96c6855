"""Lost ranks start again in the same allocation, up to the limit."""

import json
import os
from pathlib import Path

import pytest

from .cluster import wait_for
from .conftest import MakeProject
from .jobs import ENDED, Job, Project
from .trainings import both_launchers, check_end, check_same, submit


def reach(job: Job, attempt: int) -> Job:
    """Wait until an attempt has logged its own steps after a checkpoint."""
    wait_for(
        lambda: (job.run_dir / f"attempts/{attempt}.json").exists() or job.state in ENDED,
        lambda: job.log,
    )
    return job.wait_for_step(25 + 45 * attempt)


def kill(job: Job, rank: int, attempt: int = 1) -> Job:
    """Kill a rank of an attempt."""
    reach(job, attempt).ranks()[rank].kill()
    return job


def left_over(project: Project) -> list[str]:
    """Return the files that run_resumable has left in logs/."""
    kinds = ("failed", "bad-nodes", "died")
    return [str(path) for kind in kinds for path in (project.root / "logs").glob(f"{kind}-*")]


@both_launchers
def test_killed_ranks_start_again_in_the_job(
    projects: dict[str, Project], uninterrupted: Job, launcher: str
) -> None:
    project = projects[launcher]
    job = kill(kill(submit(project), rank=1), rank=0, attempt=2)
    check_end(job, uninterrupted)
    assert job.restarts == 0 and job.summary["resumed_from_step"] > 0
    assert "exit code 137, on n2" in job.log
    assert "restart 1 of 2" in job.log
    assert "exit code 137, on n1" in job.log
    attempts = sorted((job.run_dir / "attempts").glob("?.json"))
    assert [json.loads(path.read_text())["start"] for path in attempts] == [0, 1, 2]
    assert json.loads((job.run_dir / "status.json").read_text())["restart"] == 2
    assert not left_over(project)


def test_a_job_leaves_the_node_on_which_ranks_died_twice(
    projects: dict[str, Project], uninterrupted: Job
) -> None:
    options = ("--nodes=1", "--ntasks-per-node=2", "--exclude=n3")
    job = submit(projects["srun"], *options, EXCLUDE_BAD_NODES="1")
    kill(kill(job, rank=1), rank=0, attempt=2).wait_for_restart()
    check_same(job, uninterrupted)
    assert job.summary["hostnames"] == ["n2", "n2"]
    assert job.facts["ExcNodeList"] in ("n1,n3", "n[1,3]")
    assert "restart 1 of 2" in job.log
    assert "rank died twice" in job.log
    assert "job avoids n1" in job.log
    assert not left_over(projects["srun"])


NVIDIA_SMI = """\
#!/bin/bash
[[ $1 == --query-gpu=* ]] || exit
errors=0
[[ $SLURMD_NODENAME != n1 ]] || errors=2
echo "0, GPU-of-$SLURMD_NODENAME, $errors, No, No, Not Active, Not Active"
"""


@pytest.mark.parametrize("gpu_request", ["gpus_per_node", "gpus_per_task"])
def test_a_job_leaves_a_node_with_a_bad_gpu_before_it_trains(
    make_project: MakeProject, tmp_path: Path, gpu_request: str
) -> None:
    project = make_project(gpu_request=gpu_request, gpus_per_node=1, trackers=[])
    command = tmp_path / "nvidia-smi"
    command.write_text(NVIDIA_SMI)
    command.chmod(0o755)
    env = {"PREFLIGHT": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ("slurm/train_single_node.sbatch", "--device=cpu", "--dataset=synthetic")
    job = project.sbatch(*script, **env).wait()
    assert (job.state, job.restarts, job.facts["ExitCode"]) == ("FAILED", 0, "76:0"), job.log
    assert "GPU-of-n1" in job.log and "--exclude=n1" in job.log and not job.run_dir.exists()
    job = project.sbatch(*script, "--max-steps=5", **env, EXCLUDE_BAD_NODES="1")
    assert job.summary["hostnames"] == ["n2"]
    assert (job.restarts, job.facts["ExcNodeList"]) == (1, "n1")
    assert not left_over(project)


@pytest.mark.slow  # a test of tests/run waits for a rank that hangs, too
def test_ranks_that_hang_start_again_up_to_the_cap(make_project: MakeProject) -> None:
    """Without a requeue, too: the rank that waits for the other one leaves, and srun ends both."""
    project = make_project(requeue=False)
    job = submit(project, flags=("--timeout=10",))
    reach(job, attempt=1).ranks()[1].suspend()
    kill(kill(job, rank=1, attempt=2), rank=1, attempt=3)
    assert (job.wait().state, job.restarts, job.facts["ExitCode"]) == ("FAILED", 0, "137:0")
    assert "lost (exit code 76)" in job.log
    assert "started again 2 times" in job.log
    assert "bad nodes: n2" in job.log
    assert not left_over(project)


def test_near_the_time_limit_the_job_goes_back_to_the_queue(projects: dict[str, Project]) -> None:
    job = kill(submit(projects["srun"], "--time=3"), rank=1).wait_for_restart()
    assert "time ends in 1" in job.log
    assert "137), and back" in job.log
