"""Jobs in an existing image: packages that it lacks are installed from inside it."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from renderer import tomllib

from . import apptainer, pyxis
from .conftest import MakeProject
from .jobs import Project
from .test_container import QUICK, stop
from .test_stops import submit

STEPS = 117


@pytest.fixture(scope="module")
def wheels(make_project: MakeProject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What a project asks for, as the base image's pip takes it."""
    if reason := pyxis.missing() or apptainer.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("wheels")
    project = make_project(trackers=[]).root
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    apptainer.download(settings["project"]["dependencies"], folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=["pyxis", pytest.param("apptainer", marks=pytest.mark.slow)])
def project(
    make_project: MakeProject, wheels: Path, commands: Path, request: pytest.FixtureRequest
) -> Project:
    """A project with an image that is there, and with what that lacks."""
    project = make_project(
        container=request.param, container_image=str(apptainer.BASE), trackers=[], tools=["doctor"]
    )
    (project.root / "slurm/site.sh").write_text(
        f"PATH={commands}:$PATH\n"
        f"export CONTAINER_MOUNTS={wheels}:/mnt APPTAINER_BIND={wheels}:/mnt\n"
        "export APPTAINER_NO_MOUNT=home\n"  # pip's settings there are this machine's
    )
    job = project.sbatch("slurm/build_image.sbatch").wait()
    assert job.state == "COMPLETED", job.log
    return project


@pytest.mark.shows("sbatch --wait slurm/build_image.sbatch")
def test_it_trains_in_the_image(project: Project, tmp_path: Path) -> None:
    job = project.sbatch(
        "--nodes=2", "slurm/train_cpu.sbatch", *QUICK, f"--run-dir={tmp_path}/elsewhere/run"
    )
    assert job.wait().state == "COMPLETED", job.log
    assert "4 rank(s) by srun" in job.log
    assert re.search(f"^interpreter .*{apptainer.BASE}", job.log, re.MULTILINE)
    provenance = json.loads((tmp_path / "elsewhere/run/provenance.json").read_text())
    assert provenance["container"] == str(apptainer.BASE)
    assert provenance["python"]["executable"] == f"{project.root}/container/env/bin/python"


@pytest.mark.slow  # test_container.py stops jobs, too
@pytest.mark.parametrize("project", ["pyxis"], indirect=True)
def test_a_stopped_job_comes_back(project: Project) -> None:
    whole = submit(project, flags=("--epochs=1",))
    assert whole.summary["global_step"] == STEPS
    job = submit(project, flags=("--epochs=1",)).wait_for_step(30)
    stop(job)
    job.wait_for_restart()
    assert job.summary["global_step"] == STEPS and job.summary["resumed_from_step"] > 0
    assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"]


def test_doctor_knows_the_image(project: Project) -> None:
    job = project.sbatch("slurm/doctor.sbatch", "--device=cpu", "--dataset=synthetic").wait()
    assert job.state == "COMPLETED", job.log
    assert "ok       packages     all " in job.log and "/container/env/bin/python" in job.log
