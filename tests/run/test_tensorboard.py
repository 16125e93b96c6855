"""What was logged to TensorBoard is there, read with TensorBoard's own reader."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .conftest import PACED, Launch, srun

SHORT = (
    "--batch-size=32",
    "--max-steps=200",
    "--checkpoint-every=20",
    "--log-every=5",
    "--trackers=tensorboard",
)
STEPS = list(range(5, 201, 5))


def tensorboard(folder: Path) -> EventAccumulator:
    """Return TensorBoard's own view of a run."""
    sizes = {"scalars": 0, "images": 0, "histograms": 0, "tensors": 0}
    return EventAccumulator(str(folder), size_guidance=sizes).Reload()


def text(events: EventAccumulator, name: str) -> str:
    """Return the newest text of a name."""
    return events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()


def test_everything_is_there_once_of_a_resumed_run(
    project: Path, launch: Launch, tmp_path: Path
) -> None:
    flags = (*SHORT, "--tags", "odd", "even", "--histograms-every=100", "--experiment=trial")
    srun(project, tmp_path / "run", 2, *flags, **PACED).interrupt(30, "tensorboard")
    job = launch(2, *flags)
    assert job.summary["resumed_from_step"]
    events = tensorboard(job.run_dir / "tensorboard")

    for name in (
        *("train/loss", "train/lr", "train/gradient_norm", "train/samples_per_second"),
        *("train/data_seconds", "system/memory_gib", "system/cpu_percent"),
    ):
        logged = {line["step"]: line[name] for line in job.metrics() if name in line}
        assert list(logged) == STEPS, name
        assert [event.step for event in events.Scalars(name)] == STEPS, name
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx(logged, rel=1e-5), name
    assert [event.step for event in events.Scalars("test/accuracy")] == [200]

    settings = text(events, "settings")
    assert "max_steps: 200\n" in settings and "- odd\n" in settings
    assert "experiment: trial\n" in settings
    assert json.loads(text(events, "provenance").strip("`"))["world_size"] == 2
    assert "resuming from" in text(events, "log") and "test: loss" in text(events, "log")
    assert text(events, "status") == "finished"
    for picture in ("test/confusion_matrix", "test/predictions"):
        (image,) = events.Images(picture)
        assert image.step == 200 and min(image.width, image.height) > 300
    histograms = events.Tags()["histograms"]
    assert "parameters/layers.5.weight" in histograms and "gradients/layers.5.weight" in histograms
    assert [e.step for e in events.Histograms("parameters/layers.5.weight")] == [100, 200]


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_again_in_its_place(
    project: Path, launch: Launch, tmp_path: Path
) -> None:
    flags = (*SHORT, "--checkpoint-every=1000")
    stopped = srun(project, tmp_path / "run", 1, *flags, **PACED)
    stopped.interrupt(30, "tensorboard", saved=False)
    job = launch(1, *flags)
    events = tensorboard(job.run_dir / "tensorboard")
    assert [event.step for event in events.Scalars("train/loss")] == STEPS


def test_a_failed_run_says_why(launch: Launch) -> None:
    job = launch(1, *SHORT, "--lr=1e9")
    assert job.codes == [1]
    status = text(tensorboard(job.run_dir / "tensorboard"), "status")
    assert status.startswith("failed: train/loss is ")
    state = json.loads((job.run_dir / "status.json").read_text())
    assert state["status"] == "failed" and state["error"] == status.removeprefix("failed: ")
