"""What was logged is there, read back by the tracker's own reader; and no tracker stops a run."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .conftest import Job, Launch, srun

SHORT = ("--max-steps=200", "--checkpoint-every=20", "--log-every=5")
STEPS = list(range(5, 201, 5))


def tensorboard(run_dir: Path) -> EventAccumulator:
    """Return TensorBoard's own view of a run."""
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    return events.Reload()


def wandb_records(attempt: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of a kind that an attempt left for `wandb sync`."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(attempt)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    return [record[kind] for record in records if record["type"] == kind]


def interrupted(job: Job) -> None:
    """Kill a run between two checkpoints."""
    job.wait_for_step(30)
    job.kill()


def test_tensorboard_has_each_step_of_a_resumed_run_once(
    project: Path, launch: Launch, tmp_path: Path
) -> None:
    flags = (*SHORT, "--trackers=tensorboard", "--tags", "odd", "even")
    interrupted(srun(project, tmp_path / "run", 2, *flags))
    job = launch(2, *flags)
    assert job.summary["resumed_from_step"]
    events = tensorboard(job.run_dir)
    for name in ("train/loss", "train/lr"):
        assert [event.step for event in events.Scalars(name)] == STEPS
    logged = {line["step"]: line["train/loss"] for line in job.metrics() if "train/loss" in line}
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert shown == pytest.approx(logged)
    assert [event.step for event in events.Scalars("test/accuracy")] == [200]
    text = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "max_steps: 200\n" in text
    assert "- odd\n" in text


def test_wandb_without_an_account_leaves_files_to_sync(
    full_project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whoever runs this may have an account; nothing must be sent to it.
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    flags = (*SHORT, "--trackers=wandb", "--tags", "odd", "--experiment=trial")
    job = srun(full_project, tmp_path / "run", 1, *flags)
    job.wait_for_step(30)
    job.processes[0].terminate()
    assert job.wait().codes == [75], job.log
    job = srun(full_project, tmp_path / "run", 1, *flags).wait()
    assert job.summary["resumed_from_step"]

    attempts = sorted((job.run_dir / "wandb").glob("offline-run-*"))
    runs = [wandb_records(attempt, "run")[0] for attempt in attempts]
    assert len(runs) == 2
    assert len({run["run_id"] for run in runs}) == 1
    for run in runs:
        assert (run["project"], run["run_group"], run["tags"]) == ("demo", "trial", ["odd"])
        assert run["config"]["update"]["max_steps"] == 200
    rows = [row["item"] for attempt in attempts for row in wandb_records(attempt, "history")]
    assert [row["trainer/step"] for row in rows if "train/loss" in row] == STEPS


class Recorder:
    """A tracker that fails where it is told to, and remembers what went well before."""

    fails_at = ""

    def __init__(self, run: object) -> None:
        self.run_id = "recorder"
        self.done: list[str] = []
        self._call("start")

    def _call(self, name: str) -> None:
        if name == self.fails_at:
            raise OSError("disk quota exceeded")
        self.done.append(name)

    def log_metrics(self, metrics: object, step: int) -> None:
        self._call("log_metrics")

    def flush(self) -> None:
        self._call("flush")

    def finish(self, status: str) -> None:
        self._call("finish")


@pytest.mark.parametrize("fails_at", ["start", "log_metrics", "flush", "finish"])
def test_a_tracker_that_fails_is_off_and_the_others_go_on(
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails_at: str,
) -> None:
    tracking = import_module("demo.tracking")
    for name, where in (("broken", fails_at), ("sound", "")):
        module = ModuleType(f"demo.tracking.{name}")
        module.Tracker = type("Tracker", (Recorder,), {"fails_at": where})
        monkeypatch.setitem(sys.modules, module.__name__, module)

    run = tracking.Run(directory=tmp_path, name="run", experiment="trial")
    trackers = tracking.Trackers(["broken", "sound"], run, {})
    sound = trackers.active["sound"]
    for step in (1, 2):
        trackers.log_metrics({"loss": 1.0}, step)
        trackers.flush()
    trackers.finish("finished")

    assert sound.done == ["start", *["log_metrics", "flush"] * 2, "finish"]
    (record,) = caplog.records
    assert record.message.startswith("tracker broken ")
    assert record.exc_info


def test_training_goes_on_without_a_tracker_that_fails(
    project: Path, launch: Launch, tmp_path: Path
) -> None:
    # A file where the tracker needs a folder.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").touch()
    job = launch(1, *SHORT, "--trackers=tensorboard")
    assert job.summary["global_step"] == 200
    assert [line["step"] for line in job.metrics() if "train/loss" in line] == STEPS
    assert job.log.count("Traceback") == 1
    assert "tracker tensorboard could not start and is off for this run" in job.log


def test_none_silences_the_trackers_that_the_settings_name(project: Path, launch: Launch) -> None:
    assert "trackers: [tensorboard]" in (project / "configs" / "train.yaml").read_text()
    assert not (launch(1, "--trackers=none").run_dir / "tensorboard").exists()


def test_an_unknown_tracker_is_named_in_one_line(launch: Launch) -> None:
    job = launch(1, "--trackers=tensorbord")
    assert job.codes == [1]
    assert job.log.splitlines() == [
        "error: unknown tracker 'tensorbord': this project has tensorboard, and 'none' silences all"
    ]
