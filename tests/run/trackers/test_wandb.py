"""What only Weights & Biases does: its own process, and a server that it can't reach."""

import json
import logging
from importlib import import_module
from pathlib import Path
from unittest import mock

import psutil
import pytest
import wandb
from renderer import render_project

from ..conftest import PACED, srun
from . import check_numbers, show
from .wandb import attempts, shown

SHORT = (
    "--batch-size=32",
    "--max-steps=200",
    "--checkpoint-every=20",
    "--log-every=5",
    "--trackers=wandb",
)
STEPS = list(range(5, 201, 5))


def test_a_signal_to_every_process_costs_nothing(full_project: Path, tmp_path: Path) -> None:
    """As Slurm sends it: W&B's own process gets it too."""
    run_dir = tmp_path / "trial/run"
    flags = (*SHORT, f"--run-root={tmp_path}", "--experiment=trial")
    job = srun(full_project, run_dir, 2, *flags, **PACED)
    job.wait_for_tracker(30, "wandb")
    ranks = [psutil.Process(process.pid) for process in job.processes]
    own = [child for rank in ranks for child in rank.children(recursive=True)]
    assert any("wandb-core" in child.name() for child in own), own
    for process in (*own, *ranks):
        process.terminate()
    assert set(job.wait().codes) == {75}, job.log
    assert "Traceback" not in job.log
    assert "tracker wandb failed" in job.log
    job = srun(full_project, run_dir, 2, *flags).wait()
    assert job.summary["resumed_from_step"]

    check_numbers(show("wandb", run_dir), run_dir)
    assert list(show("wandb", run_dir).numbers["train/loss"]) == STEPS
    found = attempts(run_dir)
    runs = [each["run"][0] for each in found if "run" in each]
    assert json.loads((run_dir / "trackers.json").read_text()) == {"wandb": runs[0]["run_id"]}
    assert {(run["project"], run["run_id"]) for run in runs} == {("demo", runs[0]["run_id"])}
    assert found[-1]["exit"][0].get("exit_code", 0) == 0


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
    job = srun(full_project, tmp_path / "trial/run", 1, *SHORT, **env).wait()
    assert job.summary["global_step"] == 200
    assert f"sync {job.run_dir}' sends it later" in job.log
    assert list(shown(job.run_dir).numbers["train/loss"]) == STEPS
    assert "0" * 40 not in job.log
    kept = [path for path in job.run_dir.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"0" * 40 in path.read_bytes()]


def test_a_reason_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    project = render_project(tmp_path / "p", package_name="tracked", trackers=["wandb"])
    monkeypatch.syspath_prepend(str(project / "src"))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "correct-horse")
    reason = "correct-horse is no key of https://ada:battery@example.org"
    start = mock.Mock(side_effect=[wandb.errors.CommError(reason), mock.Mock(id="1")])
    monkeypatch.setattr(wandb, "init", start)
    tracking = import_module("tracked.trackers")
    with caplog.at_level(logging.WARNING):
        import_module("tracked.trackers.wandb").Tracker(tracking.Run(tmp_path, tmp_path, "a", "b"))
    assert "(<WANDB_API_KEY> is no key of https://<login>@example.org)" in caplog.text
