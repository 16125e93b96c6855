"""`evaluate` gives the same numbers as the training, from a run or only from a checkpoint."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from renderer import render_project

from .conftest import PACED, Job, spawn, srun, tasks
from .test_docs import make_digits
from .test_examples import TEXT
from .test_learner import FLAGS, check_error, make_learners
from .trackers.tensorboard import opened, text

FSDP = "--strategy=fsdp"
SMALL = ("--checkpoint-every=5", "--validate-every=10", "--log-every=5")


@pytest.fixture(scope="module")
def learners(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the owner's own metrics, records, settings and data."""
    return make_learners(tmp_path_factory.mktemp("learners") / "demo")


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the example text."""
    return render_project(tmp_path_factory.mktemp("text") / "demo", example="text")


@pytest.fixture(scope="module")
def run(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Thirty steps on the digits, with three validations."""
    return srun(project, tmp_path_factory.mktemp("run") / "run", 1, *SMALL).wait()


def evaluate(project: Path, log: Path, ranks: int, *words: object, **env: str) -> Job:
    """Evaluate on some ranks, to the end."""
    command = ["demo", "evaluate", *map(str, words), "--device=cpu"]
    return spawn(project, log, [command] * ranks, tasks(ranks, **env)).wait()


def result(job: Job, folder: Path, split: str = "test") -> dict[str, Any]:
    """Return the file of an evaluation, by split and step."""
    assert set(job.codes) == {0}, job.log
    (path,) = folder.glob(f"evaluation-{split}-*.json")
    found = json.loads(path.read_text())
    assert path.stem == f"evaluation-{split}-{found['step']:08}"
    return found


DIGITS, LEARNERS, TEXTS = "project", "learners", "writer"


@pytest.mark.shows("python -m demo evaluate *")
@pytest.mark.parametrize(
    ("name", "ranks", "flags"),
    [
        (DIGITS, 1, SMALL),
        (DIGITS, 2, (*SMALL, "--ema=0.9", "--test-batch-size=64", "--precision=bf16")),
        pytest.param(LEARNERS, 1, (*FLAGS, "--epochs=3"), marks=pytest.mark.slow),
        (LEARNERS, 2, (*FLAGS, "--epochs=3", FSDP)),
        pytest.param(
            LEARNERS, 3, (*FLAGS, "--epochs=3", "--ema=0.8", FSDP), marks=pytest.mark.slow
        ),
        (TEXTS, 2, (*TEXT, "--validate-every=10", "--ema=0.9", "--deterministic")),
    ],
    ids=lambda value: value if isinstance(value, str | int) else "",
)
def test_it_gives_the_numbers_of_the_training(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, ranks: int, flags: tuple[str, ...]
) -> None:
    """Bit for bit: the test set at the end, and the validation set at the best step."""
    project, own = request.getfixturevalue(name), {"KIND": "Parts"} if FSDP in flags else {}
    trained = srun(project, tmp_path / "run", ranks, *flags, **own).wait()
    before = {path.name for path in trained.run_dir.iterdir()}
    words = (trained.run_dir, f"--world-size={ranks}")
    job = evaluate(project, tmp_path / "test", ranks, *words, "--checkpoint=latest", **own)
    found = result(job, trained.run_dir)
    summary = trained.summary
    expected = {key: value for key, value in summary.items() if key.startswith("test_")}
    assert {key.replace("/", "_"): value for key, value in found["metrics"].items()} == expected
    assert (found["step"], found["split"]) == (summary["global_step"], "test")
    assert (found["world_size"], found["sums"]["weight"] > 0) == (ranks, True)
    assert Path(found["checkpoint"]).is_relative_to(trained.run_dir)
    for key, value in found["metrics"].items():
        assert re.search(rf"(?m)^{key} +{value:.6g}$", job.log), job.log

    job = evaluate(project, tmp_path / "best", ranks, *words, "--split=validation", **own)
    found = result(job, trained.run_dir, "validation")
    steps = [line for line in trained.metrics() if line["step"] == summary["best_step"]]
    expected = {k: v for line in steps for k, v in line.items() if k.startswith("validation/")}
    assert found["metrics"] == expected and expected
    if FSDP in flags:
        assert found["metrics"]["validation/parts"] == 1, "a rank has the whole network"
    new = {path.name.rpartition("-")[0] for path in trained.run_dir.iterdir()} - before
    assert new - {""} == {"evaluation-test", "evaluation-validation"}


def test_a_sharded_checkpoint_on_one_rank_and_the_training_set(
    learners: Path, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--epochs=3", FSDP)
    trained = srun(learners, tmp_path / "run", 2, *flags, KIND="Parts").wait()
    one = evaluate(learners, tmp_path / "one", 1, trained.run_dir, "--checkpoint=latest")
    found = result(one, trained.run_dir)["metrics"]
    assert found["test/loss"] == pytest.approx(trained.summary["test_loss"], rel=1e-6)
    job = evaluate(learners, tmp_path / "train", 2, trained.run_dir, "--split=train")
    metrics = result(job, trained.run_dir, "train")["metrics"]
    assert set(metrics) == {key.replace("test/", "train/") for key in found}


def test_a_checkpoint_that_was_copied_elsewhere_is_enough(
    project: Path, run: Job, tmp_path: Path
) -> None:
    folder = run.run_dir / "checkpoints"
    copied = tmp_path / "copied.pt"
    shutil.copy(folder / (folder / "latest").read_text(), copied)
    job = evaluate(project, tmp_path / "log", 1, copied)
    metrics = result(job, tmp_path)["metrics"]
    assert metrics["test/loss"] == run.summary["test_loss"]
    words = (copied, f"--output={tmp_path / 'other.json'}", "--trackers=tensorboard")
    job = evaluate(project, tmp_path / "tracked", 1, *words)
    check_error(job, "--trackers needs the files of a run in", "config.yaml")
    assert not (tmp_path / "other.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}/none"], "{tmp}/none has no checkpoint"),
        (["{run}", "--data-dir={tmp}/none", "--world-size=2"], "world_size is 2, but the launcher"),
        (
            ["{run}", "--output={tmp}/no/o.json"],
            "can't write {tmp}/no/o.json: No such file",
        ),
        (["{run}", "--trackers=nothing"], "unknown tracker 'nothing'"),
        (["{run}", "--batch-size=0"], "--batch-size is 0: it must be 1 or more"),
    ],
    ids=["no run", "world size", "output", "tracker", "batch size"],
)
def test_a_mistake_is_answered_in_one_line(
    project: Path, run: Job, tmp_path: Path, words: list[str], message: str
) -> None:
    places = {"run": str(run.run_dir), "tmp": str(tmp_path)}
    given = [word.format(**places) for word in words]
    job = evaluate(project, tmp_path / "log", 1, "--split=train", *given)
    check_error(job, message.format(**places))
    assert not list(run.run_dir.glob("evaluation-train*"))


def test_missing_data_and_a_stream_are_named(project: Path, tmp_path: Path) -> None:
    trained = srun(project, tmp_path / "run", 1, "--streaming", "--max-steps=2").wait()
    job = evaluate(project, tmp_path / "stream", 1, trained.run_dir, "--split=train")
    check_error(job, "the train set is a stream, which has no index: choose another --split")
    found = result(evaluate(project, tmp_path / "test", 1, trained.run_dir), trained.run_dir)
    assert found["metrics"]["test/loss"] == trained.summary["test_loss"]

    folder = trained.run_dir / "checkpoints"
    state = torch.load(folder / (folder / "latest").read_text(), weights_only=True)
    state["settings"] |= {"dataset": "mnist", "data_dir": str(tmp_path / "nowhere")}
    torch.save(state, tmp_path / "copied.pt")
    for number, flags in enumerate(((), (f"--data-dir={tmp_path}",))):
        job = evaluate(project, tmp_path / str(number), 1, tmp_path / "copied.pt", *flags)
        check_error(job, f"in {tmp_path}:" if flags else f"in {tmp_path}/nowhere:")
    state["position"]["step"] = "5"
    torch.save(state, tmp_path / "copied.pt")
    job = evaluate(project, tmp_path / "step", 1, tmp_path / "copied.pt")
    check_error(job, "copied.pt does not fit model.py or this version of the project")
    assert not list(tmp_path.glob("evaluation-*"))


def test_a_job_that_staged_its_data_elsewhere_finds_them(project: Path, tmp_path: Path) -> None:
    first, second, here = tmp_path / "first", tmp_path / "second", {"STAGED": f"{tmp_path}/first"}
    make_digits(first / "small")
    flags = ("--dataset=mnist", "--data-dir=$STAGED/small", "--epochs=9")
    trained = srun(project, tmp_path / "run", 1, *flags, "--max-steps=2", **here).wait()
    assert trained.codes == [0], trained.log
    assert "\ndata_dir: $STAGED/small\n" in (trained.run_dir / "config.yaml").read_text()

    first.rename(second)
    there = {"STAGED": str(second)}
    resumed = srun(project, tmp_path / "run", 1, *flags, "--max-steps=4", **there).wait()
    assert resumed.codes == [0] and "step 2" in resumed.log, resumed.log
    assert "data_dir was" not in resumed.log
    given = f"--data-dir={second}/small"
    for number, (words, env) in enumerate((([], there), ([given], {}))):
        words = [trained.run_dir, "--checkpoint=latest", *words]
        job = evaluate(project, tmp_path / str(number), 1, *words, **env)
        assert result(job, trained.run_dir)["step"] == 4
    for command in ("evaluate", "export"):
        words = ["demo", command, str(trained.run_dir)]
        lost = spawn(project, tmp_path / command, [words], [{}]).wait()
        check_error(lost, "data_dir of the run is $STAGED/small, a folder that its job had: set")


def test_trackers_get_each_number_once(run: Job, project: Path, tmp_path: Path) -> None:
    """First with a tracker that the run did not have. A later `sync` changes nothing."""
    flags = (*SMALL, "--trackers=tensorboard", "--lr=1.5", "--schedule=constant")
    own = srun(project, tmp_path / "run", 1, *flags).wait()
    for job, known in ((own, True), (run, False)):
        folder, best = job.run_dir, job.summary["best_step"]
        for number, split in enumerate(("validation", "test", "test")):
            log = tmp_path / f"{known}-{number}"
            words = (folder, f"--split={split}", "--trackers=tensorboard")
            assert evaluate(project, log, 1, *words).codes == [0]
        command = ["demo", "sync", str(folder), "--trackers=tensorboard"]
        assert spawn(project, tmp_path / f"{known}-sync", [command], [{}]).wait().codes == [0]
        events = opened(folder)
        validated = [line for line in job.metrics() if "validation/loss" in line]
        steps = [event.step for event in events.Scalars("validation/loss")]
        assert steps == [line["step"] for line in validated] == [10, 20, 30]
        shown = [(event.step, event.value) for event in events.Scalars("test/loss")]
        assert sorted({step for step, _ in shown}) == sorted({best, 30})
        assert len(shown) == len({best, 30})
        metrics = result(job, job.run_dir)["metrics"]
        assert dict(shown)[best] == pytest.approx(metrics["test/loss"])
        assert [event.step for event in events.Scalars("train/loss")] == [*range(5, 31, 5)]
        assert text(events, "status") == "finished"


def test_a_run_that_trains_is_evaluated(project: Path, tmp_path: Path) -> None:
    job = srun(project, tmp_path / "run", 1, *SMALL, "--max-steps=60", **PACED)
    job.wait_for_step(10)
    tracked = evaluate(project, tmp_path / "tracked", 1, job.run_dir, "--trackers=tensorboard")
    check_error(tracked, f"{job.run_dir} is training: leave --trackers out, or wait for its")
    found = evaluate(project, tmp_path / "log", 1, job.run_dir, "--checkpoint=latest")
    step = result(found, job.run_dir)["step"]
    assert job.processes[0].poll() is None, "it ended before it was evaluated"
    assert 5 <= step < job.wait().summary["global_step"] == 60
    assert len(list((job.run_dir / "attempts").glob("[0-9].json"))) == 1
