"""The Python of a project passes a type checker."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from renderer import Renderer

EVERYTHING = {
    "setup": "full",
    "package_name": "demo",
    "trackers": ["tensorboard", "wandb", "aim", "mlflow"],
    "monitoring_servers": ["tensorboard", "aim", "mlflow"],
}
PROJECTS = [
    {**EVERYTHING, "sweep": "optuna"},
    {"package_name": "demo", "sweep": "wandb", "example": "text"},
    {"package_name": "demo", "trackers": [], "example": "table"},
]


# Of a tracker, only the code around it is checked: its own packages would take two minutes.
CONFIG = """
[mypy]
ignore_missing_imports = true
[mypy-aim.*,mlflow.*,tensorboard.*,transformers.*,wandb.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the checker knows of torch and the like, for all projects."""
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.parametrize("answers", PROJECTS, ids=["digits", "text", "table"])
def test_types_fit(render: Renderer, answers: dict, cache: Path, tmp_path: Path) -> None:
    for path, text in render(answers).items():
        if path.startswith("src/"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file=../mypy.ini", f"--cache-dir={cache}"]
    done = subprocess.run(
        [*command, "--package=demo"],
        cwd=tmp_path / "src",
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
