"""A cluster for the tests in this folder, and rendered projects on it."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from renderer import render_project, shrink

from . import apptainer
from .cluster import Cluster, missing
from .jobs import Job, Project
from .trainings import STEPS, submit

ANSWERS = {
    "setup": "full",
    "gpus_per_node": 2,
    "gpu_type": "a100",
    "cpus_per_task": 1,
    "signal_lead_seconds": 30,
}
MakeProject = Callable[..., Project]
# matplotlib would take a second of each job. test_sites.py and test_acceptance.py draw figures.
NO_FIGURES = "def draw(*of_the_test: object) -> dict[str, object]:\n    return {}\n"


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster with three nodes."""
    if reason := missing():
        pytest.skip(reason)
    with Cluster(nodes=3, hasty=True) as running:
        yield running


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the command `apptainer`."""
    if reason := apptainer.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("commands")
    apptainer.install(folder)
    return folder


@pytest.fixture(autouse=True)
def _clear(cluster: Cluster) -> Iterator[None]:
    """After each test, cancel its jobs and wait until the cluster is idle."""
    yield
    cluster.run("scancel", "--full", "--signal=KILL", "--user=root", check=False)
    cluster.run("scancel", "--user=root", check=False)
    cluster.wait_until_idle()


@pytest.fixture(scope="session")
def make_project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> MakeProject:
    """Return a function that renders a project with a small network, and sets it up."""

    def make(**answers: object) -> Project:
        root = tmp_path_factory.mktemp("project") / "demo"
        shrink(render_project(root, **{**ANSWERS, **answers}))
        (root / "src/demo/figures.py").write_text(NO_FIGURES)
        set_up(root)
        return Project(cluster, root)

    return make


def set_up(root: Path) -> None:
    """Do the same as `make setup`, but without downloads: use the packages of the tests."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / ".venv"], check=True)
    (packages,) = (root / ".venv/lib").glob("python3*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({folder!r})" for folder in borrowed]
    (packages / "borrowed.pth").write_text("\n".join([*lines, str(root / "src")]) + "\n")


@pytest.fixture(scope="session")
def projects(make_project: MakeProject) -> dict[str, Project]:
    """A project for each launcher."""
    return {launcher: make_project(launcher=launcher) for launcher in ("srun", "torchrun")}


@pytest.fixture(scope="session")
def uninterrupted(projects: dict[str, Project]) -> Job:
    """The job to compare others with. It serves both launchers, because they train the same."""
    job = submit(projects["srun"])
    assert job.summary["global_step"] == STEPS
    return job


@pytest.fixture(scope="session")
def digits() -> list[str]:
    """Flags for MNIST in the folder MNIST_DIR, or for synthetic digits."""
    folder = os.environ.get("MNIST_DIR")
    return [f"--data-dir={folder}"] if folder else ["--dataset=synthetic"]
