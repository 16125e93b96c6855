"""The CI workflows of a project and of this repository: pinned actions, and no exposed token."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from renderer import TEMPLATE, Renderer

CHECKOUT = "actions/checkout@"


@pytest.fixture(scope="module")
def workflows(render: Renderer) -> dict[str, str]:
    """The workflows of this repository, and of a project with each environment."""
    found = {
        str(path.relative_to(TEMPLATE)): path.read_text()
        for path in Path(TEMPLATE, ".github/workflows").glob("*.yml")
    }
    for environment in ("venv", "uv", "conda"):
        files = render({"ci": "github", "environment": environment})
        for path in (".github/workflows/ci.yml", ".github/workflows/template.yml"):
            found[f"{environment}: {path}"] = files[path]
    return found


def jobs(workflows: dict[str, str]) -> Iterator[tuple[str, dict]]:
    """Yield each job with its workflow's path."""
    for path, text in workflows.items():
        for job in yaml.safe_load(text)["jobs"].values():
            yield path, job


def test_actions_are_pinned_by_commit(workflows: dict[str, str]) -> None:
    for path, text in workflows.items():
        lines = re.findall(r"uses: *(.*)", text)
        assert lines
        for line in lines:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), (path, line)
    # One commit for an action, everywhere.
    used = {line for text in workflows.values() for line in re.findall(r"uses: *(.*)", text)}
    assert len(used) == len({line.partition("@")[0] for line in used})


def test_a_job_may_do_what_it_says(workflows: dict[str, str]) -> None:
    for path, text in workflows.items():
        assert yaml.safe_load(text)["permissions"] == {}, path
    for path, job in jobs(workflows):
        assert job["permissions"], path


def test_each_push_is_linted_and_tested(render: Renderer, workflows: dict[str, str]) -> None:
    for path, text in workflows.items():
        if path.endswith(": .github/workflows/ci.yml"):
            workflow = yaml.safe_load(text)
            assert set(workflow[True]) == {"push", "pull_request"}, "`on`, for YAML"
            runs = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
            assert runs[-2:] == ["make lint", "make test"]
    pipeline = yaml.safe_load(render({"ci": "gitlab"})[".gitlab-ci.yml"])
    assert pipeline["test"]["script"] == ["make lint", "make test"]


def test_no_skip_passes_in_the_ci_of_this_repository() -> None:
    assert "PYTEST_ARGS='--no-skips" in (TEMPLATE / ".ci/run").read_text()


@pytest.mark.parametrize("target", ["benchmarks", "test-gpu"])
def test_a_target_that_compares_installs_what_it_compares_with(tmp_path: Path, target: str) -> None:
    command = ["make", "--dry-run", target, f"VENV={tmp_path}"]
    done = subprocess.run(command, cwd=TEMPLATE, capture_output=True, text=True, check=True)
    installed, compared, _ = done.stdout.partition("python -m benchmarks")
    assert compared and "--group benchmark" in installed


def test_no_checkout_leaves_a_token(workflows: dict[str, str]) -> None:
    for path, job in jobs(workflows):
        for step in job["steps"]:
            if step.get("uses", "").startswith(CHECKOUT):
                assert step["with"]["persist-credentials"] is False, path
                assert "token" not in step["with"], path
