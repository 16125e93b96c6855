"""Each distinct Makefile, set-up, CI job and pyproject.toml of a project is run.

The environments use the packages of the tests, so that the set-up finds all of them installed.
tests/run/test_setup.py downloads packages.
"""

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from classes import JOBS, MAKEFILES, PROJECTS, SETUPS, Class, Classes, unnamed
from packaging.requirements import Requirement
from renderer import render_project, shrink, tomllib
from variants import MODES, PYXIS_IMAGE, SIF, TOOLS, Answers

from .test_setup import CONDA, made, refused, shell

ENVIRONMENTS = ("venv", "uv", "conda")
EACH = ["venv", *(pytest.param(name, marks=pytest.mark.slow) for name in ENVIRONMENTS[1:])]
# What CI's machines have, or install: no test here may download it.
STAND_INS = {"apt-get": "", "apptainer": 'touch "${@: -2:1}"\n', "pip": ""}
OFFLINE = {
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",  # means that there is none
    "UV_OFFLINE": "1",
    "UV_NO_BUILD_ISOLATION": "1",
}
TRAIN = "ARGS=--dataset=synthetic --trackers=none --max-steps=2"
# What these three do depends on the machine: see test_data.py, test_doctor.py and, for acceptance,
# tests/slurm/test_acceptance.py.
ARGUMENTS = {
    "train": (TRAIN,),
    "data": ("ARGS=--help",),
    "doctor": ("ARGS=--help",),
    "acceptance": ("ARGS=--help",),
    "pack": ("DATA=configs",),
}
# Builds the metadata of each project that is named, as pip does.
METADATA = """
import json, os, sys
from email import message_from_string
from pathlib import Path
from hatchling.build import prepare_metadata_for_build_wheel

for folder in sys.argv[1:]:
    os.chdir(folder)
    os.mkdir("metadata")
    written = Path("metadata", prepare_metadata_for_build_wheel("metadata"))
    message = message_from_string((written / "METADATA").read_text("utf-8"))
    print(json.dumps({name: message.get_all(name) for name in ("Name", "Requires-Dist")}))
"""


def answers_of(environment: str, tools: bool) -> Answers:
    """Return answers with all commands of an environment, or with those of no tool."""
    return {
        "setup": "full",
        "environment": environment,
        "launch_modes": list(MODES),
        "trackers": [],
        "tools": list(TOOLS) if tools else [],
        "container": "apptainer" if tools else "none",
    }


def project_of(folder: Path, answers: Answers) -> Path:
    """Render a project whose environment can be set up without a download."""
    project = shrink(render_project(folder / "demo", **answers))
    tools = folder / "bin"
    tools.mkdir()
    for name, text in {**STAND_INS, "conda": CONDA}.items():
        (tools / name).write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
        (tools / name).chmod(0o755)
    if answers["environment"] != "conda":
        venv = [sys.executable, "-m", "venv", "--without-pip", project / ".venv"]
        subprocess.run(venv, check=True)
        (packages,) = project.glob(".venv/lib/python*/site-packages")
        borrow(packages)
        (project / ".venv/bin/ruff").symlink_to(Path(sys.executable).with_name("ruff"))
    return project


def borrow(packages: Path) -> None:
    """Link the packages of the tests, one by one: uv reads no .pth file, and follows no link."""
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if each.name.endswith(".dist-info"):
            shutil.copytree(each, packages / each.name, dirs_exist_ok=True)
        elif not (packages / each.name).exists():
            (packages / each.name).symlink_to(each)


def variables(project: Path) -> dict[str, str]:
    """Return the environment variables of the machine that a project is set up on."""
    tools = f"{project.parent / 'bin'}:{shell(project)['PATH']}"
    return {**OFFLINE, "TORCH": "torch", "PATH": tools, "PYTEST_ADDOPTS": "-k yours"}


def recipes(folder: Path, text: str, package: str) -> dict[str, str]:
    """Return the commands that make would run for each target of a Makefile."""
    (folder / "Makefile").write_text(text)
    found = {}
    for target in re.findall(r"^([a-z-]+):.*##", text, re.M):
        done = subprocess.run(
            ["make", "--dry-run", target], cwd=folder, env=shell(folder), capture_output=True
        )
        assert done.returncode == 0, (target, done.stderr)
        found[target] = unnamed(done.stdout.decode(), package)
    return found


def commands(job: Class) -> list[str]:
    """Return the commands of a CI file that test a project; another test has the other job's."""
    jobs: dict[str, Any] = yaml.safe_load(job.text)
    if job.path == ".gitlab-ci.yml":
        return [*jobs["test"]["before_script"], *jobs["test"]["script"]]
    return [step["run"] for step in jobs["jobs"]["test"]["steps"] if "run" in step]


@pytest.mark.parametrize("environment", EACH)
def test_every_command_of_an_environment(
    classes: Classes, tmp_path: Path, environment: str
) -> None:
    project = project_of(tmp_path, answers_of(environment, tools=True))
    env = variables(project)
    assert "run 'make setup'" in refused(project, "train", **env)
    jobs = [
        each
        for each in classes.of(JOBS)
        if each.variant.answers.get("environment", "venv") == environment
    ]
    assert {job.path for job in jobs} == {".github/workflows/ci.yml", ".gitlab-ci.yml"}
    of_jobs = dict.fromkeys(command for job in jobs for command in commands(job))
    for command in of_jobs:
        # GitHub's machines name conda's folder so; make would take it for the program.
        conda = {"CONDA": str(project.parent)} if "$CONDA" in command else {}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=project,
            env={**shell(project), "PYTHON3": sys.executable, **env, **conda},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    targets = re.findall(r"^([a-z-]+):.*##", (project / "Makefile").read_text(), re.M)
    for target in sorted(targets, key=lambda target: target == "clean-env"):
        # They need Slurm (tests/slurm/test_snapshot.py runs them) and a template (tests/update).
        if target in ("submit", "chain", "update") or f"make {target}" in of_jobs:
            continue
        made(project, target, *ARGUMENTS.get(target, ()), **env)
    assert (project / "container/release.sif").exists()
    assert not [path for name in (".venv", ".conda") for path in project.glob(name)]


@pytest.mark.parametrize("environment", EACH)
def test_it_is_set_up_without_tools(tmp_path: Path, environment: str) -> None:
    project = project_of(tmp_path, answers_of(environment, tools=False))
    made(project, "setup", **variables(project))
    made(project, "pack", **variables(project))
    assert (project / "packages.tar.sha256").exists()
    made(project, "train", TRAIN, **variables(project))


def test_the_tests_above_run_every_class(classes: Classes, tmp_path: Path) -> None:
    """No Makefile has another command for a target, and no set-up is another one."""
    known: set[tuple[str, str]] = set()
    setups = set()
    for environment in ENVIRONMENTS:
        for tools in (True, False):
            project = tmp_path / f"{environment}-{tools}"
            render_project(project, **answers_of(environment, tools))
            known |= set(recipes(project, (project / "Makefile").read_text(), "demo").items())
            setups.add(unnamed((project / "scripts/setup.sh").read_text(), "demo"))
    # These are run by jobs, in tests/slurm/test_every_script.py.
    for container, image in (("pyxis", PYXIS_IMAGE), ("pyxis", SIF), ("apptainer", SIF)):
        project = tmp_path / f"{container}-{Path(image).name}"
        render_project(project, setup="full", container=container, container_image=image)
        known |= set(recipes(project, (project / "Makefile").read_text(), "demo").items())
    assert setups >= set(classes.kinds[SETUPS])
    for makefile in classes.of(MAKEFILES):
        found = recipes(tmp_path, makefile.text, makefile.variant.package)
        assert set(found.items()) <= known, (makefile.variant.answers, set(found.items()) - known)
    assert len(classes.of(MAKEFILES)) > 15 and len(classes.of(JOBS)) == 2 * len(ENVIRONMENTS)


def test_every_pyproject_is_built_and_what_it_needs_is_tested(
    classes: Classes, tmp_path: Path
) -> None:
    """The packages of the tests fulfil the requirements of each."""
    folders = []
    for number, each in enumerate(classes.of(PROJECTS)):
        folder = tmp_path / str(number)
        (folder / "src" / each.variant.package).mkdir(parents=True)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            if name in each.variant.files:
                (folder / name).write_text(each.variant.files[name])
        folders.append(folder)
    done = subprocess.run(
        [sys.executable, "-c", METADATA, *folders], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for each, line in zip(classes.of(PROJECTS), done.stdout.splitlines(), strict=True):
        found = json.loads(line)
        package = each.variant.package
        assert re.sub("[-_.]", "_", found["Name"][0]) == package
        (script,) = tomllib.loads(each.text)["project"]["scripts"].values()
        assert f"src/{script.partition(':')[0].replace('.', '/')}.py" in each.variant.files
        for requirement in map(Requirement, found["Requires-Dist"]):
            if not requirement.marker or requirement.marker.evaluate({"extra": "dev"}):
                installed = version(requirement.name)
                assert requirement.specifier.contains(installed), (requirement, installed)
