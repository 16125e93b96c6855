"""The hooks of model.py: when and where each is called, what it can log, and how it may fail."""

import csv
import json
import shutil
import signal
from pathlib import Path

import pytest
from PIL import Image

from .conftest import Job, edited, srun
from .trackers import TRACKERS, show

HOOKS = '''

    def _say(self, training, *words):
        """Note a call, on the rank that made it; act as the environment says."""
        import os, signal, time
        import torch
        folder = os.environ["CALLS"]
        with open(f"{folder}/{training.world.rank}", "a") as file:
            print(training.position.step, *words, file=file)
        torch.rand(7)  # a hook may draw random numbers
        if os.environ.get("FAILS") == " ".join(map(str, words[:2])):
            raise KeyError("what the hook lacks")
        if os.environ.get("KILLS") == " ".join(map(str, words[:2])):
            time.sleep(3)  # until trackers have what was logged
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("SLOW") == words[0]:
            time.sleep(0.05)

    def on_start(self, training):
        self._say(training, "start")

    def on_step(self, training):
        self._say(training, "step")

    def on_evaluation_start(self, training, split):
        self._say(training, "before", split)

    def on_evaluation_end(self, training, split, metrics):
        import torch
        (images, labels), outputs = training.predict(split, 5)
        with training.evaluator.mode() as network:
            again = network(images.to(training.world.device)).cpu()
        assert torch.allclose(again, outputs, atol=1e-4)
        rows = list(zip(labels.tolist(), outputs.argmax(1).tolist()))
        training.logger.log_image(f"{split}/sample", images[0])
        training.logger.log_text(f"{split}/text", f"labels\\n{labels.tolist()}")
        training.logger.log_table(f"{split}/table", ["label", "predicted"], rows)
        training.logger.log_histogram(f"{split}/outputs", outputs)
        training.logger.log_numbers({f"{split}/largest": outputs.amax().item()})
        self._say(training, "after", split, *sorted(metrics))

    def on_checkpoint(self, training, path, best):
        assert path.exists()
        self._say(training, "checkpoint", path.name, best)

    def on_log(self, training):
        self._say(training, "log")

    def on_save(self, training):
        self._say(training, "save")

    def on_summary(self, training, summary):
        summary["mine"] = summary["global_step"] + 1
        self._say(training, "summary")

    def on_end(self, training, status, error):
        self._say(training, "end", status, type(error).__name__)

    def on_close(self, training, error):
        self._say(training, "close", type(error).__name__)
'''
SHORT = ("--max-steps=20", "--validate-every=10", "--checkpoint-every=5", "--log-every=5")


@pytest.fixture(scope="module")
def hooked(full_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with all trackers whose model has every hook."""
    copy = tmp_path_factory.mktemp("hooked") / "demo"
    shutil.copytree(full_project, copy)
    with (copy / "src" / "demo" / "model.py").open("a") as model:
        model.write(HOOKS)
    return copy


def train(
    project: Path, folder: Path, ranks: int, *flags: str, run: str = "run", **env: str
) -> Job:
    """Train, with the calls of each rank in a file of `folder`."""
    return srun(project, folder / run, ranks, *SHORT, *flags, CALLS=str(folder), **env).wait()


def calls(folder: Path, rank: int) -> list[str]:
    """Return the hooks that a rank called, without those that are called often, and the last."""
    often = (" step", " log", " save")
    *lines, last = (folder / str(rank)).read_text().splitlines()
    assert " close " in last
    return [line for line in lines if not line.endswith(often)]


def test_each_hook_is_called_on_its_ranks_and_at_its_time(
    full_project: Path, hooked: Path, tmp_path: Path
) -> None:
    job = train(hooked, tmp_path, 2)
    everywhere = [
        "0 start",
        "10 before validation",
        "10 after validation validation/accuracy validation/loss",
        "20 before validation",
        "20 after validation validation/accuracy validation/loss",
        "20 before test",
        "20 summary",
        "20 after test test/accuracy test/loss",
        "20 end finished NoneType",
    ]
    assert calls(tmp_path, 1) == everywhere
    assert [line for line in calls(tmp_path, 0) if "checkpoint" not in line] == everywhere
    saved = [line.partition(" checkpoint ")[2] for line in calls(tmp_path, 0) if "step-" in line]
    steps = [f"step-{step:08}.pt" for step in (5, 10, 15, 20)]
    assert [line.split()[0] for line in saved] == steps  # each once
    assert [line.split()[1] for line in saved[:3]] == ["False", "True", "False"]
    often = [(tmp_path / "1").read_text().count(f" {each}\n") for each in ("step", "log", "save")]
    assert often == [20, 4, 7]  # at the steps 5 and 15, three times at 10, twice at 20
    assert job.summary["mine"] == 21
    for rank in (0, 1):
        assert (tmp_path / str(rank)).read_text().endswith("20 close NoneType\n")
    # Drawing random numbers in hooks changes nothing.
    without = srun(full_project, tmp_path / "without", 2, *SHORT).wait()
    assert without.summary["parameters_sha256"] == job.summary["parameters_sha256"]


def test_a_dry_run_and_the_check_before_the_first_step_call_no_hook(
    hooked: Path, tmp_path: Path
) -> None:
    assert train(hooked, tmp_path, 1, "--dry-run").codes == [0]
    assert not (tmp_path / "0").exists()


@pytest.mark.slow
def test_hooks_log_everything_once_although_ranks_are_killed(hooked: Path, tmp_path: Path) -> None:
    flags = ("--trackers", *TRACKERS, "--strategy=fsdp")
    flags += (f"--run-root={tmp_path}", "--experiment=trial")
    killed = train(hooked, tmp_path, 2, *flags, run="trial/run", KILLS="after validation")
    assert -signal.SIGKILL in killed.codes
    job = train(hooked, tmp_path, 2, *flags, run="trial/run")
    assert job.summary["resumed_from_step"] == 10
    assert "10 start" in calls(tmp_path, 0)

    figures = job.run_dir / "figures"
    for split, step in (("validation", 10), ("validation", 20), ("test", 20)):
        with Image.open(figures / f"{split}-sample-{step:08}.png") as picture:
            assert (picture.size, picture.mode) == ((28, 28), "RGB")
        assert (figures / f"{split}-text-{step:08}.txt").read_text().startswith("labels\n[")
        with (figures / f"{split}-table-{step:08}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == 5
    logged = [line["step"] for line in job.metrics() if "validation/largest" in line]
    assert logged == [10, 20]
    assert job.log.count("step 20  validation/text: labels\n") == 1

    for tracker in TRACKERS:
        shown = show(tracker, job.run_dir)
        assert list(shown.numbers["validation/largest"]) == [10, 20], tracker
        assert list(shown.images["validation/sample"]) == [10, 20], tracker
        if shown.histograms is not None:
            assert list(shown.histograms["validation/outputs"]) == [10, 20], tracker
        assert "labels\n[" in shown.texts["validation-text"], tracker
        if shown.tables is None:
            assert shown.texts["validation-table"].startswith("label,predicted\n"), tracker
        else:
            assert list(shown.tables["validation/table"]) == [10, 20], tracker


@pytest.mark.parametrize(
    "hook, name",
    [
        ("start", "on_start"),
        ("step", "on_step"),
        ("before validation", "on_evaluation_start"),
        ("after validation", "on_evaluation_end"),
        ("checkpoint step-00000005.pt", "on_checkpoint"),
    ],
)
def test_a_hook_that_fails_is_named_and_the_run_has_failed(
    hooked: Path, tmp_path: Path, hook: str, name: str
) -> None:
    job = train(hooked, tmp_path, 1, FAILS=hook)
    assert job.codes == [1]
    assert f"{name} in model.py failed" in job.log
    assert json.loads((job.run_dir / "status.json").read_text())["status"] == "failed"
    assert calls(tmp_path, 0)[-1].endswith("end failed KeyError")


@pytest.mark.parametrize("hook", ["after test", "end finished"])
def test_a_hook_that_fails_after_the_training_does_not_cost_the_run(
    hooked: Path, tmp_path: Path, hook: str
) -> None:
    job = train(hooked, tmp_path, 1, FAILS=hook)
    assert job.codes == [1]
    assert json.loads((job.run_dir / "summary.json").read_text())["global_step"] == 20
    assert "failed at step 20" in job.log and "what the hook lacks" in job.log
    assert json.loads((job.run_dir / "status.json").read_text())["status"] == "finished"


@pytest.mark.parametrize("fails", ["", "end preempted"])
def test_a_stop_calls_the_end_and_leaves_with_75_whatever_it_does(
    hooked: Path, tmp_path: Path, fails: str
) -> None:
    job = srun(
        *(hooked, tmp_path / "run", 2, "--max-steps=100000", "--log-every=5"),
        **{"CALLS": str(tmp_path), "FAILS": fails, "SLOW": "step"},
    )
    job.wait_for_step(5)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.wait().codes == [75, 75]
    for rank in (0, 1):
        assert calls(tmp_path, rank)[-1].endswith("end preempted NoneType")
    assert ("what the hook lacks" in job.log) == bool(fails)
    slowest = [line["train/slowest_hook_seconds"] for line in job.metrics()]
    assert min(slowest) >= 0.05


def test_a_failure_elsewhere_calls_the_end_on_rank_0_alone(hooked: Path, tmp_path: Path) -> None:
    job = train(hooked, tmp_path, 2, "--lr=1e9")
    assert job.codes == [1, 1]
    assert calls(tmp_path, 0)[-1].endswith("end failed UsageError")
    assert "end" not in (tmp_path / "1").read_text()


def test_a_hook_of_another_name_is_refused(full_project: Path, tmp_path: Path) -> None:
    head = "    def build(self)"
    copy = edited(
        full_project,
        tmp_path,
        "model.py",
        head,
        f"    def on_train_start(self, trainer):\n        pass\n\n{head}",
    )
    job = srun(copy, tmp_path / "run", 1).wait()
    assert job.codes == [1]
    (line,) = [line for line in job.log.splitlines() if "error:" in line]
    assert "on_train_start in model.py" in line
