"""The command that an answer adds: sweep."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import PATIENCE, clean_environment

TRIAL = ("--dataset=synthetic", "--device=cpu", "--trackers=none", "--max-steps=20")


def sweep(project: Path, folder: Path, *flags: str, launch: str = "") -> subprocess.Popen:
    """Start a sweep of two trials; its trials, its journal and its log are in a folder."""
    train = launch or f'exec {sys.executable} -m demo train {" ".join(TRIAL)} "$@"'
    command = ["demo", "sweep", "--trials=2", f"--run-root={folder}", *flags]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *command, "--", "bash", "-c", train, "trial"],
            cwd=project,
            env=clean_environment(project),
            stdout=log,
            stderr=log,
        )


def test_a_sweep_runs_trials_and_names_the_best(full_project: Path, tmp_path: Path) -> None:
    assert sweep(full_project, tmp_path, "--study=mine").wait(PATIENCE) == 0
    trials = sorted((tmp_path / "mine").glob("trial-*"))
    assert [trial.name for trial in trials] == ["trial-0000", "trial-0001"]
    accuracy = {
        trial.name: json.loads((trial / "summary.json").read_text())["validation_accuracy"]
        for trial in trials
    }
    log = (tmp_path / "log").read_text()
    best = max(accuracy.values())
    assert f"validation accuracy {best:.4f}\nits settings: --lr=0." in log
    # The study is whole: a third start has nothing to do.
    assert sweep(full_project, tmp_path, "--study=mine").wait(PATIENCE) == 0
    assert len(list((tmp_path / "mine").glob("trial-*"))) == 2


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_a_stopped_sweep_goes_on_with_the_same_trial(
    full_project: Path, tmp_path: Path, name: str
) -> None:
    flags = ("--trials=1", "--max-steps=300", "--checkpoint-every=10")
    process = sweep(full_project, tmp_path, *flags)
    first = tmp_path / "sweep" / "trial-0000"
    deadline = time.monotonic() + PATIENCE
    while not list(first.glob("checkpoints/*.pt")):
        assert process.poll() is None and time.monotonic() < deadline, (
            tmp_path / "log"
        ).read_text()
        time.sleep(0.02)
    before = (first / "config.yaml").read_text()
    if name == "SIGKILL":
        # The whole job is gone, as when its node dies.
        children = f"/proc/{process.pid}/task/{process.pid}/children"
        for child in Path(children).read_text().split():
            os.kill(int(child), signal.SIGKILL)
    process.send_signal(getattr(signal, name))
    assert process.wait(PATIENCE) == (-signal.SIGKILL if name == "SIGKILL" else 75)
    assert not (first / "summary.json").exists()

    assert sweep(full_project, tmp_path, *flags).wait(PATIENCE) == 0
    assert json.loads((first / "summary.json").read_text())["resumed_from_step"]
    assert (first / "config.yaml").read_text() == before
    assert len(list((tmp_path / "sweep").glob("trial-*"))) == 1


def test_a_trial_that_crashes_leaves_the_others_alone(full_project: Path, tmp_path: Path) -> None:
    train = f'[[ $* != *trial-0000 ]] && exec {sys.executable} -m demo train {" ".join(TRIAL)} "$@"'
    assert sweep(full_project, tmp_path, launch=train).wait(PATIENCE) == 0
    log = (tmp_path / "log").read_text()
    assert "trial-0000 failed: exit code 1" in log
    assert "best is trial-0001" in log


def test_a_sweep_of_failures_fails(full_project: Path, tmp_path: Path) -> None:
    assert sweep(full_project, tmp_path, launch="exit 3").wait(PATIENCE) == 1
    assert (tmp_path / "log").read_text().splitlines()[-1] == "all trials failed"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "names no setting to search"),
        ("- 3", "names no setting to search"),
        ("lr: 3", "lr is 3"),
        ("lr: {low: 1, high: 0.5}", "low <= high"),
        ("lr: [fast]", "lr is 'fast': it should be a valid number"),
        ("learning_rate: [1]", "unknown setting 'learning_rate'"),
    ],
)
def test_a_mistake_in_the_search_space_is_named(
    full_project: Path, tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / "search.yaml").write_text(text)
    process = sweep(full_project, tmp_path, f"--search={tmp_path}/search.yaml")
    assert process.wait(PATIENCE) == 1
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert line.startswith("error: ")
    assert complaint in line
