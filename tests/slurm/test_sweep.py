"""Sweeps run on a cluster: their ranks, their workers, and jobs that end before them."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from .cluster import SUBNET, Cluster, wait_for
from .conftest import MakeProject
from .jobs import Job, Project

STAND_IN = Path(__file__).parents[1] / "run/wandb_server.py"
ON_TWO_NODES = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1")
ON_ONE_RANK = ("--ntasks-per-node=1",)
ONE = {"RANKS_PER_NODE": "1"}  # for torchrun's scripts
TRAIN = (
    *("--dataset=synthetic", "--validation-size=500", "--batch-size=32"),
    *("--trackers=none", "--checkpoint-every=10"),
)


@pytest.fixture(scope="module")
def project(make_project: MakeProject) -> Project:
    """A project that searches with Optuna."""
    return make_project(sweep="optuna", launch_modes=["cpu"], trackers=[])


def search(project: Project, low: float, high: float) -> str:
    """Return the flag for a search of learning rates."""
    path = project.root / f"configs/{low}.yaml"
    path.write_text(f"lr: {{low: {low:.12f}, high: {high:.12f}}}\n")
    return f"--search={path}"


def trials(project: Project, study: str) -> list[FrozenTrial]:
    """Return the trials of a study."""
    journal = str(project.root / "runs" / study / "journal.log")
    storage = JournalStorage(JournalFileBackend(journal))
    return optuna.load_study(study_name=study, storage=storage).trials


def summary(run_dir: Path) -> dict[str, Any]:
    """Return what a run says of itself."""
    return json.loads((run_dir / "summary.json").read_text())


def saved(run_dir: Path) -> int:
    """Return the step of a run's newest checkpoint, 0 if there is none."""
    names = sorted(path.stem for path in run_dir.glob("checkpoints/step-*.pt"))
    return int(names[-1].removeprefix("step-")) if names else 0


def check_ranks(job: Job, run_dir: Path) -> dict[str, Any]:
    """Return a running trial's settings, once both of its ranks are seen to have the same."""
    wait_for(lambda: saved(run_dir), lambda: job.log)
    first, second = (rank.cmdline() for rank in job.ranks().values())
    assert first == second
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert f"--lr={settings['lr']}" in first
    return settings


@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_trial_has_its_settings_on_every_rank_and_is_pruned(
    make_project: MakeProject, launcher: str
) -> None:
    project = make_project(sweep="optuna", launch_modes=["cpu"], trackers=[], launcher=launcher)
    flags = ("--study=two", "--unpruned=1", *TRAIN, "--batch-size=128")
    good = (search(project, 0.05, 0.1), "--trials=1", "--epochs=1")
    job = project.sbatch(*ON_TWO_NODES, "slurm/sweep.sbatch", *flags, *good, **ONE).wait()
    assert job.state == "COMPLETED", job.log
    study = project.root / "runs/two"
    assert summary(study / "trial-0000")["hostnames"] == ["n1", "n2"]
    # It would train for a day.
    bad = (search(project, 1e-9, 1e-8), "--trials=2", "--epochs=9999")
    job = project.sbatch(*ON_TWO_NODES, "slurm/sweep.sbatch", *flags, *bad, **ONE)
    settings = check_ranks(job, study / "trial-0001")
    assert job.wait().state == "COMPLETED", job.log
    first, second = trials(project, "two")
    assert (first.state, second.state) == (TrialState.COMPLETE, TrialState.PRUNED), job.log
    assert settings["lr"] == second.params["lr"]
    assert "best is trial-0000" in job.log and (study / "study.png").exists()


@pytest.mark.shows("sbatch *slurm/sweep.sbatch --trials 50")
@pytest.mark.slow
def test_the_tasks_of_an_array_share_a_study_and_take_over_what_was_left(project: Project) -> None:
    flags = ("--study=shared", "--trials=3", "--max-steps=150", *TRAIN)
    lost = project.sbatch("--no-requeue", *ON_ONE_RANK, "slurm/sweep.sbatch", *flags)
    study = project.root / "runs/shared"
    wait_for(lambda: saved(study / "trial-0000"), lambda: lost.log)
    project.cluster.run("scancel", "--full", "--signal=KILL", lost.id)
    lost.wait()
    array = project.sbatch("--array=0-1", *ON_ONE_RANK, "slurm/sweep.sbatch", *flags)
    tasks = [Job(project, f"{array.id}_{number}").wait() for number in (0, 1)]
    logs = [task.log for task in tasks]
    assert [task.state for task in tasks] == ["COMPLETED"] * 2, logs
    found = trials(project, "shared")
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 3, logs
    owners = {trial.user_attrs["owner"]["job"] for trial in found}
    assert owners == {task.facts["JobId"] for task in tasks}
    # Exactly one of them went on with the first trial.
    assert sum(log.count("trial-0000 of 3 trials") for log in logs) == 1
    assert summary(study / "trial-0000")["resumed_from_step"]


def test_a_requeued_job_goes_on_with_its_own_trial(cluster: Cluster, project: Project) -> None:
    flags = ("--study=own", "--max-steps=150", *TRAIN)
    job = project.sbatch(*ON_ONE_RANK, "slurm/sweep.sbatch", *flags, "--trials=1")
    study = project.root / "runs/own"
    wait_for(lambda: saved(study / "trial-0000"), lambda: job.log)
    # Killed with no time to leave its trial to others, as when memory runs out.
    (sweep,) = (child for child in job.batch_shell().children() if "sweep" in child.cmdline())
    sweep.kill()
    job.wait_for_restart()
    cluster.run("scontrol", "hold", job.id)
    wait_for(lambda: job.state == "PENDING", lambda: f"{job.facts}")
    # While it waits in the queue, nobody else takes its trial.
    other = project.sbatch(*ON_ONE_RANK, "slurm/sweep.sbatch", *flags, "--trials=2").wait()
    assert other.state == "COMPLETED", other.log
    assert "1 trial(s) still run" in other.log
    assert summary(study / "trial-0001")["resumed_from_step"] is None
    cluster.run("scontrol", "release", job.id)
    assert job.wait().state == "COMPLETED", job.log
    assert summary(study / "trial-0000")["resumed_from_step"]
    first, second = trials(project, "own")
    assert first.user_attrs["owner"]["job"] == job.id
    assert second.user_attrs["owner"]["job"] == other.id


@pytest.mark.slow
def test_a_stopped_sweep_comes_back(cluster: Cluster, project: Project) -> None:
    flags = ("--study=stopped", "--trials=1", "--max-steps=150", *TRAIN)
    job = project.sbatch(*ON_ONE_RANK, "slurm/sweep.sbatch", *flags)
    study = project.root / "runs/stopped"
    wait_for(lambda: saved(study / "trial-0000"), lambda: job.log)
    cluster.run("scancel", "--signal=USR2", job.id)  # as before the time limit
    job.wait_for_restart()
    assert job.wait().state == "COMPLETED", job.log
    assert "checkpoint, and back" in job.log
    assert summary(study / "trial-0000")["resumed_from_step"]
    assert len(trials(project, "stopped")) == 1


@contextmanager
def wandb_server(project: Project, *given: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Run the stand-in for W&B's server on the login node; yield what makes wandb talk to it."""
    cluster, address = project.cluster, f"{SUBNET}.1"
    sweep = str(project.root / "configs/sweep.yaml")
    server = subprocess.Popen(
        [*cluster.enter, "--", sys.executable, str(STAND_IN), address, sweep, json.dumps(given)],
        env=cluster.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = server.stdout.readline().strip()
        yield {"WANDB_BASE_URL": f"http://{address}:{port}", "WANDB_API_KEY": "0123456789" * 4}
    finally:
        server.stdin.close()
        server.wait()


def test_the_agent_of_wandb_starts_trials_on_all_ranks(
    cluster: Cluster, make_project: MakeProject
) -> None:
    project = make_project(sweep="wandb", launch_modes=["cpu"], trackers=[])
    given = ({"lr": 0.125, "max_steps": 800}, {"lr": -1}, {"lr": 0.25, "max_steps": 20})
    script = ("slurm/sweep.sbatch", "ada/net/x1", *TRAIN)
    sweep = project.root / "runs/x1"
    with wandb_server(project, *given) as env:
        cancelled = project.sbatch(*ON_TWO_NODES, *script, **env)
        assert check_ranks(cancelled, sweep / "t0")["lr"] == 0.125
        cluster.run("scancel", cancelled.id)
        assert cancelled.wait().state == "CANCELLED"
        wait_for(lambda: "the job was cancelled" in cancelled.log, lambda: cancelled.log)
        assert not (sweep / "t1").exists()
        stopped_at = saved(sweep / "t0")
        # The next agent gets the same trial.
        job = project.sbatch(*ON_TWO_NODES, *script, **env)
        wait_for(lambda: saved(sweep / "t0") > stopped_at, lambda: job.log)
        cluster.run("scancel", "--signal=USR2", job.id)  # as before the time limit
        job.wait_for_restart()
        assert job.wait().state == "COMPLETED", job.log
    assert "checkpoint, and back" in job.log
    assert (sweep / "t0/summary.json").exists(), job.log
    assert summary(sweep / "t0")["resumed_from_step"] > stopped_at
    assert summary(sweep / "t0")["hostnames"] == ["n1", "n2"]
    assert "lr is -1.0" in job.log
    assert "3 trial(s), of which 1 failed" in job.log
    settings = yaml.safe_load((sweep / "t2/config.yaml").read_text())
    assert settings["lr"] == 0.25 and summary(sweep / "t2")["world_size"] == 2
    assert "of which 1 failed" in job.log
