"""With pre-commit, git refuses a commit if `make lint` finds a fault, offline too."""

import subprocess
from pathlib import Path

import pytest

from .conftest import clean_environment
from .test_every_command import project_of, variables
from .test_setup import made

# What pip writes where it installs pre-commit; here it is found in the packages of the tests.
PROGRAM = "#!{}\nfrom pre_commit.main import main\n\nraise SystemExit(main())\n"
ANSWERS = {"setup": "full", "environment": "venv", "trackers": [], "pre_commit": True}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project in git, as a newcomer has it who has followed its README."""
    project = project_of(tmp_path, ANSWERS)
    made(project, "setup", **variables(project))
    program = project / ".venv/bin/pre-commit"
    program.write_text(PROGRAM.format(program.with_name("python")))
    program.chmod(0o755)
    for command in (
        "git init && git add --all && git commit --message 'From the template'",
        ".venv/bin/pre-commit install",
    ):
        done = run(project, command)
        assert done.returncode == 0, done.stdout + done.stderr
    return project


def run(project: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in a project without access to the internet."""
    known = {"GIT_CONFIG_GLOBAL": str(project.with_name("gitconfig"))}
    Path(known["GIT_CONFIG_GLOBAL"]).write_text("[user]\n\tname = Ada\n\temail = a@example.org\n")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    cache = {"PRE_COMMIT_HOME": str(project.with_name("pre-commit"))}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=project,
        env={**clean_environment(project), **known, **nowhere, **cache},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow  # the linters that it runs are those of `make lint`
@pytest.mark.shows("pre-commit install")
def test_a_commit_with_a_fault_is_refused_and_a_clean_one_passes(project: Path) -> None:
    model = project / "src/demo/model.py"
    clean = model.read_text()
    model.write_text(f"import this_is_not_used\n{clean}")
    done = run(project, "git commit --all --message Fault")
    assert done.returncode != 0
    assert "F401" in done.stdout + done.stderr, done.stdout + done.stderr
    assert log(project) == ["From the template"]
    model.write_text(f"{clean}\nOWN = 1\n")
    done = run(project, "git commit --all --message Clean")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Passed" in done.stdout + done.stderr and "deprecated" not in done.stderr
    assert log(project) == ["Clean", "From the template"]


def log(project: Path) -> list[str]:
    """Return the first lines of the commits, the newest first."""
    return run(project, "git log --format=%s").stdout.splitlines()
