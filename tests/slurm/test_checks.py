"""The checks that run before GPU hours are spent, as jobs on a cluster with and without faults."""

import json
import re

import pytest

from .cluster import Cluster
from .conftest import MakeProject
from .jobs import Project

CPU = ("--device=cpu", "--dataset=synthetic")
SMALL = ("--device=cpu", "--max-bytes=1048576", "--timeout=20")


@pytest.mark.parametrize("launcher", [pytest.param("srun", marks=pytest.mark.slow), "torchrun"])
def test_ranks_on_two_nodes_understand_each_other(
    projects: dict[str, Project], launcher: str
) -> None:
    project = projects[launcher]
    job = project.sbatch("slurm/check_comm.sbatch", *SMALL, "--json=found.json").wait()
    assert job.state == "COMPLETED", job.log
    found = json.loads((project.root / "found.json").read_text())
    assert found["hosts"] == ["n1", "n1", "n2", "n2"]
    assert {row["operation"] for row in found["speed"]} == {"all-reduce", "all-gather"}
    assert "4 ranks on gloo: all results are right" in job.log


@pytest.mark.shows("sbatch *slurm/check_comm.sbatch*")
def test_a_slow_link_stands_out(cluster: Cluster, projects: dict[str, Project]) -> None:
    project = projects["srun"]
    cluster.run(
        *("tc", "qdisc", "add", "dev", "to-n3", "root"),
        *("tbf", "rate", "20mbit", "burst", "64kb", "latency", "500ms"),
    )
    try:
        job = project.sbatch(
            *("--nodes=3", "--ntasks-per-node=1", "--gres=gpu:a100:1"),
            *("slurm/check_comm.sbatch", *SMALL, "--max-bytes=16384"),
            *("--pairs", "--json=pairs.json"),
        ).wait()
    finally:
        cluster.run("tc", "qdisc", "delete", "dev", "to-n3", "root")
    assert job.state == "COMPLETED", job.log
    pairs = json.loads((project.root / "pairs.json").read_text())["pairs"]
    slow = {tuple(pair["hosts"]): pair["slow"] for pair in pairs}
    assert slow == {("n1", "n2"): False, ("n1", "n3"): True, ("n2", "n3"): True}
    assert job.log.count("SLOW") == 2


def doctor(project: Project, *flags: str) -> tuple[int, str]:
    """Run doctor on the login node; return its exit code and its output."""
    command = (".venv/bin/python", "-m", "demo", "doctor", *CPU, *flags)
    done = project.cluster.run(*command, cwd=project.root, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_project_that_fits_the_cluster_has_no_errors(projects: dict[str, Project]) -> None:
    code, said = doctor(projects["srun"])
    assert code == 0, said
    assert "0 error(s)" in said
    for script in ("train_cpu", "train_single_node", "train_multi_node"):
        assert f"ok       scripts      slurm/{script}.sbatch: " in said
        assert re.search(rf"accepts slurm/{script}\.sbatch: sbatch: Job \d+", said)


def test_what_the_cluster_does_not_have_is_named(make_project: MakeProject) -> None:
    project = make_project(nodes=5, gpu_type="h100", time_limit="2-00:00:00", cpu_partition="night")
    code, said = doctor(project)
    assert code == 1
    for script in ("train_cpu", "train_single_node", "train_multi_node"):
        assert f"error    Slurm        refuses slurm/{script}.sbatch: " in said
    assert said.count("allocation failure: ") == 3, said
    assert "Traceback" not in said


SLEEPS = """

class Model(Model):
    \"\"\"Takes long on one node.\"\"\"

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        import os
        import time

        from .plugins import slow_ranks

        slow_ranks.LINES, slow_ranks.SECONDS = 3, 0.0
        time.sleep(os.environ["SLURMD_NODENAME"] == "n2")  # a second
        return super().loss(network, batch)
"""


@pytest.mark.parametrize("launcher", [pytest.param("srun", marks=pytest.mark.slow), "torchrun"])
def test_a_node_whose_rank_is_slow_is_named(make_project: MakeProject, launcher: str) -> None:
    project = make_project(launcher=launcher, launch_modes=["cpu"])
    with (project.root / "src/demo/model.py").open("a") as file:
        file.write(SLEEPS)
    job = project.sbatch(
        *("--nodes=2", "--nodelist=n1,n2", "--ntasks-per-node=1", "slurm/train_cpu.sbatch"),
        *("--dataset=synthetic", "--max-steps=6", "--batch-size=8", "--log-every=1"),
        RANKS_PER_NODE="1",
    ).wait()
    assert job.state == "COMPLETED", job.log
    (said,) = json.loads((job.run_dir / "status.json").read_text())["warnings"]
    assert said.startswith("rank 1 on n2 is slow: ") and "--exclude=n2" in said
    assert job.log.count(" is slow: ") == 1 and said in job.log
    assert "bad nodes: n2" in job.log


@pytest.mark.shows("sbatch slurm/doctor.sbatch")
def test_the_nodes_of_a_job_agree(projects: dict[str, Project]) -> None:
    job = projects["srun"].sbatch("slurm/doctor.sbatch", *CPU).wait()
    assert job.state == "COMPLETED", job.log
    assert "0 error(s)" in job.log
    assert "same on 2 node(s)" in job.log
    assert not list(projects["srun"].root.glob("runs/.doctor*"))


def test_a_folder_that_is_not_shared_is_found(
    cluster: Cluster, projects: dict[str, Project]
) -> None:
    project = projects["srun"]
    folder = project.root / "elsewhere"
    folder.mkdir()
    # Jobs are root's here, and see what their node has mounted.
    cluster.run("srun", "--nodelist=n2", "mount", "-t", "tmpfs", "tmpfs", str(folder))
    try:
        options = ("--nodelist=n1,n2", "slurm/doctor.sbatch", *CPU)
        job = project.sbatch(*options, "--run-root=elsewhere").wait()
    finally:
        cluster.run("srun", "--nodelist=n2", "umount", str(folder))
    assert job.state == "FAILED"
    assert "n2: elsewhere is not" in job.log
