"""The Python of a project passes the type checker, as `make lint` starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from renderer import render_project

EVERYTHING = {
    "setup": "full",
    "trackers": ["tensorboard", "wandb", "aim", "mlflow"],
    "monitoring_servers": ["tensorboard", "aim", "mlflow"],
}
PROJECTS = [
    {**EVERYTHING, "sweep": "optuna"},
    {"sweep": "wandb", "example": "text"},
    {"trackers": [], "tools": [], "example": "table"},
    {"trackers": [], "tools": [], "example": "images"},
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the checker knows of torch and the like, for all projects."""
    return tmp_path_factory.mktemp("mypy")


def check(project: Path, cache: Path) -> None:
    """Run the checker in a project."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": "", "MYPY_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("answers", PROJECTS, ids=["digits", "text", "table", "images"])
def test_types_fit(answers: dict, cache: Path, tmp_path: Path) -> None:
    check(render_project(tmp_path / "demo", **answers), cache)


@pytest.mark.slow
@pytest.mark.parametrize("title", pages.EXAMPLES)
def test_types_of_own_models_fit(title: str, cache: Path, tmp_path: Path) -> None:
    check(pages.put_example(render_project(tmp_path / "demo"), title), cache)
