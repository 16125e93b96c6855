"""A newcomer's first minutes: set up, check, train, by the commands that the README names."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from renderer import render_project

from .conftest import clean_environment


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of the default answers, in a folder with a space in its name."""
    return render_project(tmp_path_factory.mktemp("my work") / "demo", package_name="demo")


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make in a project, with an environment of its own; return what it said."""
    env = clean_environment(folder)
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "OMP_NUM_THREADS"):
        env.pop(name, None)
    torch = env.pop("TORCH", "torch==2.13.0")
    return subprocess.run(
        ["make", f"TORCH={torch}", f"PYTHON3={sys.executable}", *arguments],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=1800,
    )


def test_from_make_setup_to_a_trained_model(newcomer: Path) -> None:
    early = make(newcomer, "train")
    assert early.returncode != 0 and "run make setup" in early.stderr

    for target in ("setup", "setup", "lint", "test"):
        done = make(newcomer, target)
        assert done.returncode == 0, (target, done.stdout[-3000:], done.stderr[-3000:])
    assert " passed" in done.stdout and "skipped" not in done.stdout

    data = os.environ.get("MNIST_DIR")
    dataset = f"--dataset mnist --data-dir '{data}'" if data else "--dataset synthetic"
    done = make(newcomer, "train", f"ARGS={dataset} --run-dir runs/first --max-steps 100")
    assert done.returncode == 0, done.stderr
    summary = json.loads((newcomer / "runs" / "first" / "summary.json").read_text())
    assert (summary["world_size"], summary["global_step"]) == (2, 100)
    assert list((newcomer / "runs" / "first" / "tensorboard").glob("events.*"))
    script = newcomer / ".venv" / "bin" / "demo"
    done = subprocess.run([script, "--help"], capture_output=True, text=True, check=True)
    assert "train" in done.stdout and "download" in done.stdout

    assert make(newcomer, "clean-env").returncode == 0
    assert not (newcomer / ".venv").exists()


def test_a_full_projects_own_tests_are_green(tmp_path: Path) -> None:
    trackers = ["tensorboard", "wandb", "aim", "mlflow"]
    answers = {"setup": "full", "trackers": trackers, "sweep": "optuna"}
    folder = render_project(tmp_path / "demo", **answers)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=folder,
        env=clean_environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "8 passed" in done.stdout
