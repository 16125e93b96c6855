"""Weights & Biases without an account, read with its own reader."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import wandb

from .conftest import PACED, render_project, srun

SHORT = (
    "--batch-size=32",
    "--max-steps=200",
    "--checkpoint-every=20",
    "--log-every=5",
    "--trackers=wandb",
)
STEPS = list(range(5, 201, 5))


@pytest.fixture(autouse=True)
def _no_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user of the tests may have an account; nothing must be sent to it."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def inspect(attempt: Path) -> Iterator[dict[str, Any]]:
    """Yield the records that an attempt left for `wandb sync`."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(attempt)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            yield json.loads(line)


def attempts_of(folder: Path) -> list[dict[str, list[Any]]]:
    """Return the records of each attempt of a run, by kind."""
    found = []
    # One that was killed at its start left a folder without records.
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        records: dict[str, list[Any]] = {}
        for record in inspect(file.parent):
            records.setdefault(record["type"], []).append(record[record["type"]])
        found.append(records)
    return found


def numbers(attempts: list[dict[str, list[Any]]], name: str) -> list[tuple[int, Any]]:
    """Return the steps and values of a metric over all attempts."""
    rows = [row["item"] for each in attempts for row in each.get("history", [])]
    return sorted((row["trainer/step"], row[name]) for row in rows if name in row)


@pytest.mark.parametrize("how", [pytest.param("kill", marks=pytest.mark.slow), "terminate"])
def test_everything_is_there_once_of_a_resumed_run(
    full_project: Path, tmp_path: Path, how: str
) -> None:
    flags = (*SHORT, "--tags", "odd", "--experiment=trial", "--histograms-every=100")
    job = srun(full_project, tmp_path / "run", 2, *flags, **PACED)
    if how == "kill":
        job.interrupt(30, "wandb")
    else:
        job.wait_for_tracker(30, "wandb")
        # As Slurm does: every process of the ranks gets the signal, W&B's own too.
        ranks = [psutil.Process(process.pid) for process in job.processes]
        own = [child for rank in ranks for child in rank.children(recursive=True)]
        assert any("wandb-core" in child.name() for child in own), own
        for process in (*own, *ranks):
            process.terminate()
        assert set(job.wait().codes) == {75}, job.log
        assert "Traceback" not in job.log
        assert "tracker wandb failed and is off (" in job.log
    job = srun(full_project, tmp_path / "run", 2, *flags).wait()
    assert job.summary["resumed_from_step"]

    attempts = attempts_of(job.run_dir)
    runs = [each["run"][0] for each in attempts if "run" in each]
    assert len({run["run_id"] for run in runs}) == 1
    assert json.loads((job.run_dir / "trackers.json").read_text()) == {"wandb": runs[0]["run_id"]}
    for run in runs:
        assert (run["project"], run["run_group"], run["tags"]) == ("demo", "trial", ["odd"])
        assert run["config"]["update"]["max_steps"] == 200
        assert run["config"]["update"]["provenance"]["world_size"] == 2
    for name in ("train/loss", "train/lr", "train/gradient_norm", "system/memory_gib"):
        logged = [(line["step"], line[name]) for line in job.metrics() if name in line]
        shown = numbers(attempts, name)
        assert [step for step, _ in shown] == STEPS, name
        if not name.startswith("system/"):
            assert [value for _, value in shown] == pytest.approx([value for _, value in logged])

    last = attempts[-1]
    assert numbers([last], "test/predictions._type") == [(200, "image-file")]
    histograms = numbers(attempts, "gradients/layers.5.weight._type")
    assert histograms == [(100, "histogram"), (200, "histogram")]
    assert last["exit"][0].get("exit_code", 0) == 0
    (log,) = job.run_dir.glob("wandb/latest-run/files/log.txt")
    assert "test: loss" in log.read_text()


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(
            {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"},
            marks=pytest.mark.slow,
        ),
        # As .env without its key.
        {"WANDB_MODE": "online"},
    ],
    ids=["unreachable", "no key"],
)
def test_a_server_out_of_reach_leaves_files_and_says_how_to_send_them(
    full_project: Path, tmp_path: Path, env: dict[str, str]
) -> None:
    job = srun(full_project, tmp_path / "run", 1, *SHORT, **env).wait()
    assert job.summary["global_step"] == 200
    assert f"sync {job.run_dir}' sends it later" in job.log
    assert [step for step, _ in numbers(attempts_of(job.run_dir), "train/loss")] == STEPS
    assert "0" * 40 not in job.log
    kept = [path for path in job.run_dir.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"0" * 40 in path.read_bytes()]


def test_a_reason_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    project = render_project(tmp_path / "p", package_name="tracked", trackers=["wandb"])
    monkeypatch.syspath_prepend(str(project / "src"))
    monkeypatch.setenv("WANDB_API_KEY", "correct-horse")
    reason = "correct-horse is no key of https://ada:battery@example.org"
    start = mock.Mock(side_effect=[wandb.errors.CommError(reason), mock.Mock(id="1")])
    monkeypatch.setattr(wandb, "init", start)
    tracking = import_module("tracked.trackers")
    with caplog.at_level(logging.WARNING):
        import_module("tracked.trackers.wandb").Tracker(tracking.Run(tmp_path, tmp_path, "a", "b"))
    assert "(<WANDB_API_KEY> is no key of https://<login>@example.org)" in caplog.text
