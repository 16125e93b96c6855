"""A stopped job is requeued by itself, and ends where the uninterrupted job ends."""

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from metrics import reproducible

from .cluster import PATIENCE, Cluster, wait_for
from .conftest import MakeProject
from .jobs import ENDED, Job, Project
from .trainings import (
    FILTERS,
    STEPS,
    both_launchers,
    check_checkpoints,
    check_end,
    check_same,
    submit,
    suspend,
)


@pytest.mark.shows("sbatch --time=30 slurm/*")
@pytest.mark.parametrize(
    ("launcher", "options"),
    [
        # The signal comes 60 to 90 seconds after the start, as the script says.
        pytest.param("srun", ("--time=2",), marks=pytest.mark.slow),
        # Here it comes after 15 to 45 seconds.
        ("torchrun", ("--time=1", "--signal=USR2@15")),
    ],
)
def test_the_time_limit_nears(
    projects: dict[str, Project], uninterrupted: Job, launcher: str, options: tuple[str, ...]
) -> None:
    job = submit(projects[launcher], *options).wait_for_step(30)
    suspend(job).wait_for_restart()
    projects[launcher].cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=1-0")
    check_same(job, uninterrupted)
    assert "checkpoint, and back" in job.log
    assert "by SIGUSR2" in job.log


@both_launchers
def test_a_higher_partition_preempts_it(
    cluster: Cluster, projects: dict[str, Project], uninterrupted: Job, launcher: str
) -> None:
    job = suspend(submit(projects[launcher], **FILTERS).wait_for_step(30))
    rival = projects[launcher].sbatch(
        *("--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    )
    rival.wait_until("RUNNING", "COMPLETED")
    assert job.restarts == 1
    check_same(job, uninterrupted)
    assert "by SIGTERM" in job.log


@pytest.mark.parametrize(("strategy", "ranks_per_node"), [("fsdp", 1), ("ddp", 2)])
@pytest.mark.slow
def test_sharded_networks_and_four_ranks_come_back_from_preemption(
    projects: dict[str, Project], strategy: str, ranks_per_node: int
) -> None:
    """With FSDP each node saves its part; with more than two ranks, sums depend on their order."""
    options = (f"--ntasks-per-node={ranks_per_node}",)
    flags = (f"--strategy={strategy}", "--max-steps=150", "--epochs=9")
    whole = submit(projects["srun"], *options, flags=flags)
    assert whole.summary["global_step"] == 150
    assert whole.summary["world_size"] == 2 * ranks_per_node
    job = suspend(submit(projects["srun"], *options, flags=flags).wait_for_step(30))
    rival = projects["srun"].sbatch(
        *("--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    )
    rival.wait_until("RUNNING", "COMPLETED")
    assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert job.summary["resumed_from_step"] > 0
    assert reproducible(job.metrics()) == reproducible(whole.metrics())
    assert "Traceback" not in job.log
    folder = job.run_dir / "checkpoints"
    if strategy == "fsdp":
        shards = [path.name for path in (folder / "step-00000150.shards").iterdir()]
        assert sorted(shards) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    check_checkpoints(folder)


@pytest.mark.slow
def test_it_is_suspended_for_longer_than_a_rank_waits(
    cluster: Cluster, projects: dict[str, Project], uninterrupted: Job
) -> None:
    """As with PreemptMode=SUSPEND: Slurm stops the processes without a notice, and they go on."""
    job = submit(projects["srun"], flags=("--timeout=5",)).wait_for_step(30)
    cluster.run("scontrol", "suspend", job.id)
    job.wait_until("SUSPENDED")
    time.sleep(10)
    cluster.run("scontrol", "resume", job.id)
    check_end(job, uninterrupted)
    # If a rank was waiting for the other one, its time is over: the ranks start again in the job.
    attempts = 1 + ("restart 1 of 2" in job.log)
    assert (job.restarts, job.summary["usage"]["attempts"]) == (0, attempts)


@both_launchers
@pytest.mark.slow
def test_an_administrator_requeues_it(
    cluster: Cluster, projects: dict[str, Project], uninterrupted: Job, launcher: str
) -> None:
    job = suspend(submit(projects[launcher]).wait_for_step(30))
    cluster.run("scontrol", "requeue", job.id)
    check_same(job, uninterrupted)
    assert "to the queue" in job.log


@pytest.mark.parametrize(
    ("launcher", "rank"), [pytest.param("srun", 1, marks=pytest.mark.slow), ("torchrun", 0)]
)
def test_a_rank_is_killed(
    projects: dict[str, Project], uninterrupted: Job, launcher: str, rank: int
) -> None:
    job = submit(projects[launcher], RESTARTS_IN_JOB="0").wait_for_step(30)
    job.ranks()[rank].kill()
    job.wait_for_restart()
    assert "137), and back" in job.log
    check_same(job, uninterrupted)


def test_an_expedited_job_comes_back_at_once(
    cluster: Cluster, make_project: MakeProject, uninterrupted: Job
) -> None:
    project = make_project(requeue="expedited", launch_modes=["cpu"])
    if cluster.version < "25.11":
        command = (".venv/bin/python", "-m", "demo", "doctor", "--device=cpu", "--trackers=none")
        said = cluster.run(*command, cwd=project.root, check=False).stdout
        assert "--requeue=expedite needs Slurm 25.11" in said
        return
    job = submit(project).wait_for_step(30)
    job.ranks()[1].kill()
    job.wait_for_restart()
    check_same(job, uninterrupted)
    assert "to the queue\n" in job.log and job.facts["ExpeditedRequeue"] == "Yes"
    # Slurm does the same after a node failure.
    job = submit(project).wait_for_step(30)
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    check_same(job, uninterrupted)
    # Slurm holds a job that fails on nodes without a fault.
    failed = submit(project, flags=("--epochs=none",)).wait_until("REQUEUE_HOLD", *ENDED)
    assert (failed.state, failed.restarts) == ("REQUEUE_HOLD", 1)
    cancelled = submit(project).wait_for_step(25)
    cluster.run("scancel", cancelled.id)
    assert (cancelled.wait().state, cancelled.restarts) == ("CANCELLED", 0), cancelled.log


@pytest.mark.slow
def test_one_task_of_an_array_comes_back_alone(
    cluster: Cluster, projects: dict[str, Project], uninterrupted: Job
) -> None:
    array = submit(projects["srun"], "--array=0,7")
    stopped, other = (Job(array.project, f"{array.id}_{seed}") for seed in (0, 7))
    stopped.wait_for_step(30)
    cluster.run("scancel", "--signal=USR2", stopped.id)
    check_same(stopped, uninterrupted)
    assert other.summary["resumed_from_step"] is None
    assert other.restarts == 0


def test_a_killed_rank_ends_the_job_at_the_cap(projects: dict[str, Project]) -> None:
    job = submit(projects["srun"], MAX_REQUEUES="0", RESTARTS_IN_JOB="0").wait_for_step(5)
    job.ranks()[1].kill()
    assert job.wait().state == "FAILED"
    assert job.facts["ExitCode"] == "137:0" and job.restarts == 0
    assert "done 0 times" in job.log
    assert not job.ranks()


@both_launchers
def test_an_evaluation_that_is_stopped_is_not_requeued(
    projects: dict[str, Project], launcher: str
) -> None:
    project, script = projects[launcher], "slurm/train_cpu.sbatch"
    trained = project.sbatch(script, "--dataset=synthetic", "--max-steps=2")
    assert trained.summary["global_step"] == 2
    words = (str(trained.run_dir), "--split", "train", "--batch-size=1")
    job = project.sbatch(script, "evaluate", *words)
    wait_for(lambda: len(job.ranks()) == 2 or job.state in ENDED, lambda: job.log)
    project.cluster.run("scancel", "--signal=USR2", job.id)
    assert (job.wait().state, job.restarts) == ("FAILED", 0), job.log
    assert job.facts["ExitCode"] == "140:0" and "Traceback" not in job.log
    assert not list(trained.run_dir.glob("evaluation-*"))


def test_without_requeue_a_stopped_job_ends(make_project: MakeProject) -> None:
    project = make_project(requeue=False)
    killed = submit(project, RESTARTS_IN_JOB="0").wait_for_step(5)
    killed.ranks()[0].kill()
    assert (killed.wait().state, killed.restarts) == ("FAILED", 0)
    stopped = submit(project).wait_for_step(5)
    project.cluster.run("scancel", "--signal=USR2", stopped.id)
    assert (stopped.wait().state, stopped.restarts) == ("FAILED", 0)
    assert "submit again with --run-dir" in stopped.log


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_node_is_cut_off(
    cluster: Cluster, projects: dict[str, Project], uninterrupted: Job, lost: int
) -> None:
    job = submit(projects["srun"]).wait_for_step(30)
    assert job.facts["NodeList"] == "n[1-2]"
    node = cluster.nodes[lost]
    cluster.cut_off(node)
    try:
        check_same(job, uninterrupted)
    finally:
        cluster.mend(node)
    assert job.summary["hostnames"] == [n for n in cluster.nodes if n != node]
    assert "restart 1 of" not in job.log


HANGS = """

class Model(Model):
    \"\"\"Hangs forever on rank 1, once.\"\"\"

    calls = 0

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        import os
        import time
        from pathlib import Path

        self.calls += 1
        if self.calls == 50 and os.environ["SLURM_PROCID"] == "1" and not Path("hung").exists():
            Path("hung").touch()
            while True:
                time.sleep(1)
        return super().loss(network, batch)
"""


@pytest.mark.slow
def test_a_rank_that_hangs_until_the_time_limit(
    make_project: MakeProject, uninterrupted: Job
) -> None:
    project = make_project(launch_modes=["cpu"])
    with (project.root / "src/demo/model.py").open("a") as file:
        file.write(HANGS)
    job, hung = submit(project), project.root / "hung"
    wait_for(hung.exists, lambda: job.log)
    # No rank can save: Slurm kills them all, and the job goes on from the checkpoint before.
    project.cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=1")
    job.wait_for_restart()
    project.cluster.run("scontrol", "update", f"JobId={job.id}", "TimeLimit=1-0")
    check_same(job, uninterrupted)
    assert job.summary["resumed_from_step"] == 40


FAILS = """

class Model(Model):
    \"\"\"Fails on rank 1, while rank 0 is busy with something that never ends.\"\"\"

    calls = 0

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        import os
        import time

        self.calls += 1
        if self.calls == 50:
            if os.environ["SLURM_PROCID"] == "1":
                raise ValueError("a fault of the program")
            while True:
                time.sleep(1)
        return super().loss(network, batch)
"""


FAILS_AT_IMPORT = """
import os

if os.environ.get("SLURM_PROCID") == "1":
    raise ValueError("a fault of the program")
"""


@pytest.mark.parametrize(
    ("launcher", "fault"),
    [
        pytest.param("srun", FAILS, id="training"),
        pytest.param("torchrun", FAILS, id="torchrun", marks=pytest.mark.slow),
        pytest.param("srun", FAILS_AT_IMPORT, id="import"),
    ],
)
def test_a_fault_of_the_program_ends_the_job(
    make_project: MakeProject, launcher: str, fault: str
) -> None:
    """The other rank is killed, or leaves: srun's exit code tells that alone.

    From Slurm 26.05 on it gets SIGTERM first, as if it were to save and stop.
    """
    project = make_project(launch_modes=["cpu"], launcher=launcher)
    with (project.root / "src/demo/model.py").open("a") as file:
        file.write(fault)
    job = submit(project)
    wait_for(lambda: job.state in ENDED or job.restarts, lambda: job.log)
    assert (job.state, job.facts["ExitCode"], job.restarts) == ("FAILED", "1:0", 0), job.log
    assert "ValueError: a fault of the program" in job.log
    assert "after a checkpoint" not in job.log
    assert "in this allocation" not in job.log


@both_launchers
def test_ranks_that_can_never_meet_end_the_job(projects: dict[str, Project], launcher: str) -> None:
    """On each node they listen where nobody else can reach them."""
    job = submit(projects[launcher], GLOO_SOCKET_IFNAME="lo")
    wait_for(lambda: job.state in ENDED or job.restarts, lambda: job.log)
    assert (job.state, job.facts["ExitCode"], job.restarts) == ("FAILED", "1:0", 0), job.log
    assert re.search(r"others at n1:\d+: Gloo", job.log)


# Never starts on n2.
SLOW_PYTHON = """\
#!/bin/bash
[[ $SLURMD_NODENAME != n2 ]] || exec sleep 1000
exec .venv/bin/python "$@"
"""


@both_launchers
def test_a_node_that_never_comes_is_named(
    cluster: Cluster, projects: dict[str, Project], tmp_path: Path, launcher: str
) -> None:
    """Not if a signal ends the wait: then the job is requeued."""
    python = tmp_path / "python"
    python.write_text(SLOW_PYTHON)
    python.chmod(0o755)
    files = {"PROJECT_PYTHON": str(python), "RESTARTS_IN_JOB": "0"}
    job = submit(projects[launcher], flags=("--meet-timeout=15",), **files)
    wait_for(lambda: job.meets() or job.state in ENDED, lambda: job.log)
    cluster.run("scancel", "--signal=USR2", job.id)
    job.wait_for_restart()
    assert "140), and back" in job.log
    assert "missing" not in job.log and "bad nodes" not in job.log
    assert job.wait().facts["NodeList"] == "n[1-2]"
    assert (job.state, job.facts["ExitCode"], job.restarts) == ("FAILED", "1:0", 1), job.log
    (line,) = re.findall(r"^\d: error: .*", job.log, re.MULTILINE)
    what = {"srun": "rank", "torchrun": "torchrun"}[launcher]
    assert f"after 15 seconds, 1 of 2 {what}s are missing: {what} 1; none came from n2: " in line
    assert "bad nodes: n2" in job.log and "Traceback" not in job.log


@pytest.mark.slow
def test_a_torchrun_that_can_never_reach_the_first_node_ends_the_job(
    make_project: MakeProject,
) -> None:
    project = make_project(launch_modes=["cpu"], launcher="torchrun")
    (project.root / "slurm/site.sh").write_text("MASTER_ADDR=n9\n")
    job = submit(project, flags=("--meet-timeout=5",))
    wait_for(lambda: job.state in ENDED or job.restarts, lambda: job.log)
    assert (job.state, job.facts["ExitCode"], job.restarts) == ("FAILED", "1:0", 0), job.log
    assert re.search(r"others at n9:\d+", job.log)


@pytest.mark.slow
def test_a_controller_that_is_busy_when_the_job_stops(
    cluster: Cluster, projects: dict[str, Project], uninterrupted: Job
) -> None:
    job = submit(projects["srun"]).wait_for_step(30)
    shell, ranks = job.batch_shell(), job.ranks()
    with cluster.busy():
        for rank in ranks.values():
            rank.send_signal(signal.SIGUSR2)
        wait_for(
            lambda: not any(rank.is_running() for rank in ranks.values()),
            lambda: "the ranks do not leave",
        )
        # Slurm did not answer the script, which pauses before it asks again. Since 26.05, srun
        # itself waits for the controller.
        waits = "sleep" if cluster.version < "26.05" else "srun"
        wait_for(
            lambda: any(child.name() == waits for child in shell.children()),
            lambda: "the script does not ask again",
        )
    # Slurm repeats what it could not send: its order to end the step may reach the next start's,
    # which has the same number.
    check_same(job, uninterrupted, most_restarts=2)
    assert "checkpoint, and back" in job.log


@both_launchers
@pytest.mark.slow
def test_the_batch_shell_is_killed(
    projects: dict[str, Project], uninterrupted: Job, launcher: str
) -> None:
    job = submit(projects[launcher]).wait_for_step(30)
    job.batch_shell().kill()
    check_same(job, uninterrupted)


# Waits in its first start until the batch shell, its parent, is killed.
WAITING_PYTHON = """\
#!/bin/bash
if [[ $1 == --version && ! -e waited ]]; then
    touch waited
    exec sleep 1000
fi
exec .venv/bin/python "$@"
"""


@pytest.mark.slow
def test_the_batch_shell_is_killed_while_no_rank_runs(
    make_project: MakeProject, uninterrupted: Job, tmp_path: Path
) -> None:
    """Before the ranks start, and right after they died."""
    python = tmp_path / "python"
    python.write_text(WAITING_PYTHON)
    python.chmod(0o755)
    project = make_project(launch_modes=["cpu"])
    job = submit(project, PROJECT_PYTHON=str(python))
    wait_for((project.root / "waited").exists, lambda: job.log)
    job.batch_shell().kill()
    job.wait_for_restart().wait_for_step(30)
    shell, ranks = job.batch_shell(), job.ranks()
    for rank in ranks.values():
        rank.kill()
    psutil.wait_procs(ranks.values(), PATIENCE)
    shell.kill()
    wait_for(lambda: job.restarts == 2 or job.state in ENDED, lambda: job.log, 0.2)
    check_same(job, uninterrupted, most_restarts=2)


@pytest.mark.slow
def test_rank_0_is_killed_while_it_writes_a_checkpoint(
    projects: dict[str, Project], uninterrupted: Job
) -> None:
    job = submit(projects["srun"], flags=("--checkpoint-every=1",), RESTARTS_IN_JOB="0")
    job.wait_for_step(12)
    writer = job.ranks()[0]
    folder = job.run_dir / "checkpoints"
    while True:
        while not list(folder.glob("step-*.tmp")):
            assert writer.is_running(), job.log
            time.sleep(0.0005)
        writer.suspend()
        if list(folder.glob("step-*.tmp")):
            break
        writer.resume()
    written = (folder / "latest").read_text()
    writer.kill()
    job.wait_for_restart()
    job.wait()
    assert (
        f"resuming from {job.run_dir.relative_to(job.project.root)}/checkpoints/{written}"
        in job.log
    )
    check_same(job, uninterrupted)


class FullDisk:
    """A disk that the nodes share, and that a test fills."""

    def __init__(self, cluster: Cluster) -> None:
        self.folder = cluster.seen_by_nodes(cluster.small)
        self.filler = self.folder / "filler"

    def fill(self) -> None:
        """Leave no byte free."""
        with self.filler.open("wb", buffering=0) as file:
            for size in (2**16, 2**10, 1):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    continue

    def empty(self) -> None:
        """Make room again."""
        self.filler.unlink()


@pytest.fixture
def disk(cluster: Cluster) -> FullDisk:
    """A disk with room, at first."""
    cluster.run("find", str(cluster.small), "-mindepth", "1", "-delete")
    return FullDisk(cluster)


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.slow
def test_the_disk_is_full(
    cluster: Cluster,
    projects: dict[str, Project],
    uninterrupted: Job,
    disk: FullDisk,
    stopped: bool,
) -> None:
    flags = (f"--run-dir={cluster.small}/run", "--keep-checkpoints=1")
    job = submit(projects["srun"], flags=flags)
    wait_for((disk.folder / "run/checkpoints/latest").exists, lambda: job.log)
    disk.fill()
    wait_for(lambda: "could not write" in job.log or job.state != "RUNNING", lambda: job.log)
    assert "could not write" in job.log
    check_checkpoints(disk.folder / "run/checkpoints")
    if stopped:
        cluster.run("scancel", "--signal=USR2", job.id)
        assert (job.wait().state, job.restarts) == ("FAILED", 0)
        assert "error: stopped at" in job.log and "make room for" in job.log
        check_checkpoints(disk.folder / "run/checkpoints")
        disk.empty()
        job = submit(projects["srun"], flags=flags)
    else:
        ranks = job.ranks().values()
        for rank in ranks:
            rank.suspend()  # so that there is room before the last checkpoint
        disk.empty()
        for rank in ranks:
            rank.resume()
    assert job.wait().state == "COMPLETED", job.log
    summary = json.loads((disk.folder / "run/summary.json").read_text())
    assert summary["parameters_sha256"] == uninterrupted.summary["parameters_sha256"]
    steps = [json.loads(line) for line in (disk.folder / "run/metrics.jsonl").open()]
    assert [line["step"] for line in steps if "train/loss" in line] == list(range(1, STEPS + 1))
    check_checkpoints(disk.folder / "run/checkpoints")


def test_a_job_that_came_back_often_enough_ends_as_failed(
    cluster: Cluster, projects: dict[str, Project]
) -> None:
    job = submit(projects["srun"], MAX_REQUEUES="1").wait_for_step(10)
    cluster.run("scancel", "--signal=USR2", job.id)
    job.wait_for_restart()
    job.wait_for_step(int(job.metrics()[-1]["step"]) + 10)
    cluster.run("scancel", "--signal=USR2", job.id)
    assert job.wait().state == "FAILED"
    assert job.facts["ExitCode"] == "75:0"
    assert "done 1 times" in job.log


@both_launchers
def test_a_cancelled_job_stays_away(
    cluster: Cluster, projects: dict[str, Project], launcher: str
) -> None:
    job = submit(projects[launcher]).wait_for_step(25)
    cluster.run("scancel", job.id)
    job.wait()
    cluster.wait_until_idle()
    time.sleep(2)  # in which a requeue would show
    assert (job.state, job.restarts) == ("CANCELLED", 0)
    assert "job was cancelled" in job.log
    stopped_at = int(job.metrics()[-1]["step"])
    folder = job.run_dir / "checkpoints"
    assert (folder / "latest").read_text() == f"step-{stopped_at:08}.pt"
    check_checkpoints(folder)
