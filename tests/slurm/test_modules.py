"""The module lines of the scripts, with the real module systems."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import modules
from .cluster import Cluster
from .conftest import MakeProject
from .jobs import Job, Project


@pytest.fixture(scope="module", params=["environment-modules", "lmod"])
def system(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A module system, installed on the cluster."""
    if reason := modules.missing(request.param):
        pytest.skip(reason)
    with modules.installed(cluster, request.param, tmp_path_factory.mktemp("site")):
        yield request.param


def submit(project: Project, *arguments: str, login: str = "true") -> Job:
    """Submit from a login shell, in which somebody has typed a line before."""
    command = ("bash", "-lc", f'{login} && exec sbatch "$@"', "bash", *arguments)
    done = project.cluster.run(*command, cwd=project.root, check=False)
    found = re.fullmatch(r"Submitted batch job (\d+)\n", done.stdout)
    assert found, done.stdout + done.stderr
    return Job(project, found[1])


def test_ranks_have_the_modules_that_the_script_names(
    system: str, make_project: MakeProject
) -> None:
    project = modules.probe(make_project, "demo-tool/1.0\npython")
    script = ("--nodes=2", "slurm/train_cpu.sbatch")
    login = "module load kept/1.0 demo-tool/2.0"
    jobs = {
        # Only a sticky module survives `module purge`.
        "kept/1.0:": submit(project, *script, login=login),
        "": submit(project, "--export=NONE", *script, login=login),
    }
    for stays, job in jobs.items():
        kept = "yes" if stays else ""
        said = f"demo-tool 1.0 {stays}demo-tool/1.0:python/3.12 kept={kept} packages=src scratch="
        assert modules.found_by_ranks(job) == [
            f"{node} {said}" for node in ("n1", "n1", "n2", "n2")
        ]


def test_modules_of_the_login_session_stay_if_so_answered(
    system: str, make_project: MakeProject
) -> None:
    project = modules.probe(make_project, "python/3.12", module_purge=False)
    job = submit(project, "slurm/train_cpu.sbatch", login="module load demo-tool/2.0 python/3.12")
    assert (
        modules.found_by_ranks(job)
        == ["n1 demo-tool 2.0 demo-tool/2.0:python/3.12 kept= packages=src scratch="] * 2
    )


def test_a_module_that_cannot_be_loaded_ends_the_job(
    system: str, make_project: MakeProject
) -> None:
    project = modules.probe(make_project, "demo-tool/1.0\nwanted/1.0")
    text = (project.root / "slurm/train_cpu.sbatch").read_text()
    assert text.count("wanted/1.0") == 1
    offered = {
        "demo-tool/3.0": "demo-tool/1.0 demo-tool/2.0",
        "Python/3.12": "python/3.12",
        "absent/1.0": "nothing",
        "broken/1.0": "broken/1.0",
        "needy/1.0": "needy/1.0",
        "rival/1.0": "rival/1.0",
    }
    jobs = {}
    for number, name in enumerate(offered):
        script = project.root / f"slurm/wants_{number}.sbatch"
        script.write_text(text.replace("wanted/1.0", name))
        jobs[name] = submit(project, f"slurm/{script.name}")
    for name, job in jobs.items():
        assert (job.wait().state, job.facts["ExitCode"]) == ("FAILED", "1:0"), job.log
        errors = [line for line in job.log.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and f"error: module {name} " in errors[0], job.log
        assert errors[0].endswith(f" has {offered[name]}"), job.log
        assert "found" not in job.log


@pytest.mark.parametrize("place", ["profile.d", "MODULESHOME", "login shell"])
def test_module_may_be_a_function_of_login_shells_only(
    system: str, make_project: MakeProject, place: str
) -> None:
    project = modules.probe(make_project, "demo-tool/2.0")
    common = project.root / "slurm/common.sh"
    text = common.read_text()
    for part in ("/etc/profile.d/", "/init/bash"):
        assert part in text
        if place == "login shell" or (place == "MODULESHOME" and part != "/init/bash"):
            text = text.replace(part, "/no/")
    common.write_text(text)
    job = submit(project, "slurm/train_cpu.sbatch", login="unset BASH_ENV; unset -f module ml")
    assert (
        modules.found_by_ranks(job)
        == ["n1 demo-tool 2.0 demo-tool/2.0 kept= packages=src scratch="] * 2
    )


@pytest.mark.shows("module use *")
def test_modules_come_from_where_the_site_says(
    system: str, make_project: MakeProject, tmp_path: Path
) -> None:
    project = modules.probe(make_project, "extra/1.0")
    modules.write(tmp_path / "modules", {"extra/1.0": "module load demo-tool/1.0"})
    facts = f"module use {tmp_path}/modules\nexport SCRATCH=/scratch/$SLURM_JOB_ID\n"
    (project.root / "slurm/site.sh").write_text(facts)
    job = submit(project, "--nodes=2", "slurm/train_cpu.sbatch")
    said = f"demo-tool 1.0 demo-tool/1.0:extra/1.0 kept= packages=src scratch=/scratch/{job.id}"
    assert modules.found_by_ranks(job) == [f"{node} {said}" for node in ("n1", "n1", "n2", "n2")]


@pytest.mark.shows("module load *")
def test_a_training_has_the_modules(system: str, make_project: MakeProject) -> None:
    project = make_project(modules="demo-tool/1.0\npython/3.12", trackers=[])
    flags = ("--device=cpu", "--dataset=synthetic", "--epochs=1000")
    options = ("--nodes=2", "--ntasks-per-node=1")
    job = submit(project, *options, "slurm/train_cpu.sbatch", *flags).wait_for_step(1)
    ranks = job.ranks()
    assert sorted(ranks) == [0, 1]
    for process in ranks.values():
        env = process.environ()
        assert env["DEMO_PYTHON"] == "3.12" and env["PYTHONPATH"] == f"{env['CODE_DIR']}/src"
        assert "/tools/1.0:" in env["PATH"]


def test_doctor_finds_what_scripts_cannot_load(system: str, make_project: MakeProject) -> None:
    project = make_project(modules="python/3.12\ndemo-tool/3.0", launch_modes=["cpu"])
    command = ".venv/bin/python -m demo doctor --dataset=synthetic"
    done = project.cluster.run("bash", "-lc", command, cwd=project.root, check=False)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert "module demo-tool/3.0 can't" in line
