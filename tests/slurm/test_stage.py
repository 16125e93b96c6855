"""Packages and data are copied to the nodes' own disks, and removed there at the job's end."""

import io
import os
import re
import shutil
import signal
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .cluster import Cluster
from .conftest import MakeProject
from .jobs import Project

ON_TWO, SCRIPT = ("--nodes=2", "--nodelist=n1,n2"), "slurm/train_cpu.sbatch"


@contextmanager
def disks(cluster: Cluster, **sizes: str) -> Iterator[Path]:
    """Yield a folder that is another disk on each node; `sizes` are of nodes, else 64m."""
    folder = cluster.folder / "disk"
    folder.mkdir(exist_ok=True)
    for node in cluster.nodes:
        size = f"size={sizes.get(node, '64m')}"
        mount = ("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder))
        cluster.run("srun", f"--nodelist={node}", *mount)
    yield folder
    on_nodes(cluster, "umount", "--lazy", str(folder))


def on_nodes(cluster: Cluster, *command: str) -> str:
    """Return the output of a command on all nodes."""
    every = ("srun", f"--nodes={len(cluster.nodes)}", "--ntasks-per-node=1", *command)
    return cluster.run(*every).stdout


def left_on(cluster: Cluster, disk: Path) -> list[str]:
    """Return the folders on all nodes."""
    return on_nodes(cluster, "ls", str(disk)).split()


def packed(project: Project, *arguments: str) -> None:
    """Run `make pack`."""
    make = ["make", "pack", *arguments]
    subprocess.run(make, cwd=project.root, check=True, capture_output=True)


def site(project: Project, disk: Path, files: str) -> None:
    """Write slurm/site.sh."""
    text = f"STAGE_DIR={disk}\nSTAGE_FILES=({files})\n"
    (project.root / "slurm/site.sh").write_text(text)


@pytest.mark.shows("make pack")
@pytest.mark.parametrize("launcher", ["srun", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_a_job_reads_its_packages_and_data_from_its_nodes(
    make_project: MakeProject, digits: list[str], launcher: str
) -> None:
    """After a restart as well, and with the same run folder."""
    project = make_project(launch_modes=["cpu"], launcher=launcher, trackers=[])
    cluster, root = project.cluster, project.root
    elsewhere = root.with_name("env")  # as ENV_ROOT makes it
    shutil.move(root / ".venv", elsewhere)
    (root / ".venv").symlink_to(elsewhere)
    packed(project)
    # Only the copies on the nodes have packages from now on.
    (borrowed,) = elsewhere.glob("lib/python3*/site-packages/borrowed.pth")
    borrowed.write_text("")
    files, data = "packages.tar", digits
    if digits[0].startswith("--data-dir"):
        packed(project, f"DATA={os.environ['MNIST_DIR']}")
        name = Path(os.environ["MNIST_DIR"]).name
        files, data = f"packages.tar {name}.tar", [f"--data-dir=$STAGED/{name}"]
    with disks(cluster) as disk:
        site(project, disk, files)
        flags = (*ON_TWO, "--ntasks-per-node=1", SCRIPT, *data, "--checkpoint-every=10")

        if launcher == "srun":  # a job that is killed leaves its folder, until the next one
            killed = project.sbatch("--no-requeue", *flags, MAX_REQUEUES="0")
            killed.wait_for_step(1)
            killed.batch_shell().send_signal(signal.SIGKILL)
            killed.wait()
            assert left_on(cluster, disk) == [f"stage-0-{killed.id}"] * 2

        job = project.sbatch(*flags, "--max-steps=100", RANKS_PER_NODE="1")
        if launcher == "srun":
            job.wait_for_step(20)
            cluster.run("scontrol", "requeue", job.id)
            assert job.wait_for_restart().summary["resumed_from_step"] > 0
        assert job.summary["global_step"] == 100
        assert left_on(cluster, disk) == []
    python = f"{disk}/stage-0-{job.id}/.venv/bin/python"
    assert job.log.count(f"interpreter  {python} (Python 3.") == 1 + job.restarts, job.log


def test_what_cannot_be_staged_is_said(make_project: MakeProject) -> None:
    """The error is one line before the training, and nothing stays on the nodes."""
    project = make_project(launch_modes=["cpu"], trackers=[])
    cluster, root = project.cluster, project.root
    pack = root / "packages.tar"
    flags = (*ON_TWO, SCRIPT, "--dataset=synthetic", "--max-steps=5")

    def refused(files: str, disk: Path) -> str:
        site(project, disk, files)
        job = project.sbatch(*flags).wait()
        assert (job.state, job.facts["ExitCode"]) == ("FAILED", "1:0"), job.log
        # Each node may say it.
        errors = re.findall(r"^error: (?:n[12]:? )?(.*)", job.log, re.M)
        assert len(set(errors)) == 1, job.log
        return errors[0]

    with disks(cluster, n2="2m") as disk:
        assert refused("packages.tar", disk).startswith("packages.tar, which STAGE_FILES names, is")
        packed(project)
        (root / "large").mkdir()
        (root / "large/file").write_bytes(bytes(3 << 20))
        packed(project, "DATA=large")
        assert f"2 MiB free in {disk}, and STAGE_FILES needs 3" in refused("large.tar", disk)
        whole = pack.read_bytes()
        where = whole.index(b"site.addsitedir")
        for damaged, said in (
            (whole[:where] + b"S" + whole[where + 1 :], "packages.tar is damaged"),
            (whole[: where + 100], "can't unpack packages.tar: tar: Unexpected EOF"),
        ):
            pack.write_bytes(damaged)
            assert said in refused("packages.tar", disk)
        digest = root / "packages.tar.sha256"
        kept = digest.read_text()
        digest.unlink()
        with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
            header = archive.getmembers()[-1].offset
        pack.write_bytes(whole[:header])  # tar takes this for the end
        assert refused("packages.tar", disk).startswith("packages.tar has no packages.tar.sha256")
        digest.write_text(kept)
        pack.write_bytes(whole)
        said = refused("packages.tar", Path("/proc/none"))
        assert said.startswith("mkdir: cannot create") and "set STAGE_DIR in slurm/site.sh" in said

        # A pack that is older than the environment is not used.
        (packages,) = (root / ".venv/lib").glob("python3*/site-packages")
        later = pack.stat().st_mtime + 1
        os.utime(packages, (later, later))
        site(project, disk, "packages.tar")
        job = project.sbatch(*flags)
        assert job.summary["global_step"] == 5
        assert "packages.tar is older than .venv" in job.log
        assert f"interpreter  {root}/.venv/bin/python" in job.log
        assert left_on(cluster, disk) == []
