"""A sweep with Optuna: its trials, its workers, and what prunes and stops trials."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from .conftest import PATIENCE, clean_environment, python

TRIAL = (
    *("--dataset=synthetic", "--validation-size=500", "--device=cpu", "--trackers=none"),
    "--max-steps=20",
)


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


def space(folder: Path, text: str) -> str:
    """Return the flag for a search space."""
    (folder / "space.yaml").write_text(text)
    return f"--search={folder}/space.yaml"


def trials(folder: Path) -> list[FrozenTrial]:
    """Return the trials of the study in a folder."""
    storage = JournalStorage(JournalFileBackend(str(folder / "journal.log")))
    return optuna.load_study(study_name=folder.name, storage=storage).trials


def wait_for_checkpoint(run_dir: Path, process: subprocess.Popen, folder: Path) -> None:
    """Return once a trial has saved a checkpoint."""
    deadline = time.monotonic() + PATIENCE
    while not list(run_dir.glob("checkpoints/*.pt")):
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.02)


def kill_all(process: subprocess.Popen) -> None:
    """Kill a sweep and its trial, as when their node dies."""
    children = f"/proc/{process.pid}/task/{process.pid}/children"
    for child in Path(children).read_text().split():
        os.kill(int(child), signal.SIGKILL)
    process.kill()
    process.wait()


def test_a_sweep_runs_trials_and_names_the_best(full_project: Path, tmp_path: Path) -> None:
    assert sweep(full_project, tmp_path, "--study=mine", "--seed=3").wait(PATIENCE) == 0
    folder = tmp_path / "mine"
    runs = sorted(path.name for path in folder.glob("trial-*"))
    assert runs == ["trial-0000", "trial-0001"]
    accuracy = {
        run: json.loads((folder / run / "summary.json").read_text())["validation_accuracy"]
        for run in runs
    }
    assert {trial.value for trial in trials(folder)} == set(accuracy.values())
    log = (tmp_path / "log").read_text()
    best = max(runs, key=lambda run: accuracy[run])
    assert f"best is {best}, validation/accuracy {accuracy[best]:.4f}\nits settings: --lr=0." in log
    # The study is whole: a third start has nothing to do.
    assert sweep(full_project, tmp_path, "--study=mine").wait(PATIENCE) == 0
    assert sorted(path.name for path in folder.glob("trial-*")) == runs
    # Another training with its best settings gives the same.
    again = tmp_path / "again"
    train = ["demo", "train", f"--config={folder}/best.yaml", f"--run-dir={again}"]
    subprocess.run(
        [sys.executable, "-m", *train],
        cwd=full_project,
        env=clean_environment(full_project),
        check=True,
    )
    digests = [
        json.loads((run / "summary.json").read_text())["parameters_sha256"]
        for run in (again, folder / best)
    ]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_stopped_sweep_goes_on_with_the_same_trial(
    full_project: Path, tmp_path: Path, name: str
) -> None:
    flags = ("--trials=1", "--max-steps=150", "--checkpoint-every=10")
    process = sweep(full_project, tmp_path, *flags)
    first = tmp_path / "sweep" / "trial-0000"
    wait_for_checkpoint(first, process, tmp_path)
    before = (first / "config.yaml").read_text()
    process.send_signal(getattr(signal, name))
    assert process.wait(PATIENCE) == 75
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


def test_a_trial_that_is_worse_than_others_is_pruned(full_project: Path, tmp_path: Path) -> None:
    train = f'exec {sys.executable} -m demo train {" ".join(TRIAL[:-1])} --batch-size=128 "$@"'
    good = space(tmp_path, "lr: {low: 0.1, high: 0.2}")
    assert sweep(full_project, tmp_path, good, "--trials=1", launch=train).wait(PATIENCE) == 0
    # It would train for an hour.
    bad = space(tmp_path, "lr: {low: 1.0e-9, high: 1.0e-8}")
    flags = (bad, "--unpruned=1", "--epochs=2000")
    assert sweep(full_project, tmp_path, *flags, launch=train).wait(PATIENCE) == 0
    log = (tmp_path / "log").read_text()
    first, second = trials(tmp_path / "sweep")
    assert first.state == TrialState.COMPLETE, log
    assert second.state == TrialState.PRUNED, log
    assert second.value == second.intermediate_values[max(second.intermediate_values)]
    assert "trial-0001: pruned after" in log and "best is trial-0000" in log
    pruned = tmp_path / "sweep" / "trial-0001"
    assert list(pruned.glob("checkpoints/*.pt")) and not (pruned / "summary.json").exists()


def test_trials_are_drawn(full_project: Path, tmp_path: Path) -> None:
    study = (
        "import optuna\n"
        "from optuna.trial import TrialState, create_trial\n"
        "from demo.tools.sweep.results import picture\n"
        "study = optuna.create_study(direction='maximize')\n"
        "lr = optuna.distributions.FloatDistribution(0.01, 1, log=True)\n"
        "size = optuna.distributions.CategoricalDistribution([16, 64])\n"
        "states = [TrialState.COMPLETE] * 3 + [TrialState.PRUNED, TrialState.FAIL]\n"
        "for state, value in zip(states, [0.5, 0.9, 0.7, 0.2, None]):\n"
        "    study.add_trial(create_trial(state=state, value=value,\n"
        "        params={'lr': 0.1, 'size': 64}, distributions={'lr': lr, 'size': size}))\n"
        "for axes in picture(study, 'accuracy').axes:\n"
        "    print(axes.get_xlabel(), axes.get_xscale())\n"
        "    print([mark.get_offsets().data[:, 1].tolist() for mark in axes.collections])\n"
        "    print([line.get_ydata().tolist() for line in axes.lines])\n"
    )
    points = "[[0.5, 0.9, 0.7], [0.2], [0.0]]"
    assert python(full_project, study).splitlines() == [
        *("trial linear", points, "[[0.5, 0.9, 0.9]]"),
        *("lr log", points, "[]"),
        *("size linear", points, "[]"),
    ]


@pytest.mark.slow
def test_workers_share_the_trials_and_take_over_one_left_behind(
    full_project: Path, tmp_path: Path
) -> None:
    flags = ("--trials=3", "--max-steps=150", "--checkpoint-every=10")
    lost = sweep(full_project, tmp_path, *flags)
    first = tmp_path / "sweep" / "trial-0000"
    wait_for_checkpoint(first, lost, tmp_path)
    kill_all(lost)
    workers = [sweep(full_project, tmp_path, *flags) for _ in range(2)]
    assert [worker.wait(PATIENCE) for worker in workers] == [0, 0]
    log = (tmp_path / "log").read_text()
    found = trials(tmp_path / "sweep")
    assert [trial.state for trial in found] == [TrialState.COMPLETE] * 3, log
    owners = {trial.user_attrs["owner"]["pid"] for trial in found}
    assert owners == {worker.pid for worker in workers}
    # By the lost one, and by one of the others.
    assert log.count("trial-0000 of 3 trials") == 2, log
    assert json.loads((first / "summary.json").read_text())["resumed_from_step"]
    assert len(list((tmp_path / "sweep").glob("trial-*/summary.json"))) == 3
    assert (tmp_path / "sweep" / "study.png").read_bytes().startswith(b"\x89PNG")


def test_of_two_workers_that_want_a_trial_one_gets_it(full_project: Path, tmp_path: Path) -> None:
    race = (
        "import optuna, pathlib, sys\n"
        "from optuna.storages import JournalStorage\n"
        "from optuna.storages.journal import JournalFileBackend\n"
        "from demo.tools.sweep.trial_locks import TrialLocks\n"
        "def worker():\n"
        "    storage = JournalStorage(JournalFileBackend(f'{sys.argv[1]}/journal.log'))\n"
        "    study = optuna.create_study(storage=storage, study_name='s', load_if_exists=True)\n"
        "    return TrialLocks(study, pathlib.Path(sys.argv[1]))\n"
        "space = {'lr': optuna.distributions.FloatDistribution(0.01, 1)}\n"
        "first, second, third = worker(), worker(), worker()\n"
        "first.release(first.next(space, 2))\n"
        "seen = third._left_behind()\n"
        "third._left_behind = lambda: seen\n"  # and then the other is faster
        "print(*[w.next(space, 2).number for w in (second, third)], third.next(space, 2))\n"
    )
    assert python(full_project, race, tmp_path) == "0 1 None\n"


OLD_SIZE = """
import sys
from pathlib import Path
import optuna
from demo.tools.sweep.optuna import Flags, Progress, conclude
study = optuna.create_study(direction="maximize")
file = Path(sys.argv[1])
progress = Progress(study.ask(), file, Flags(metric="score", direction="maximize"))
line = '{"step": 1, "score": 0.5}'
file.write_text(f"{'{}':{len(line)}}\\n")
assert not progress.is_hopeless()
file.write_text(f"{line}\\n")
conclude(progress.trial, 0, False, progress)
assert study.best_value == 0.5
"""


def test_the_end_of_a_trial_is_read_where_a_disk_shows_its_old_size(
    full_project: Path, tmp_path: Path
) -> None:
    python(full_project, OLD_SIZE, tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("first", "then", "complaint"),
    [
        ("validation/loss minimize", "x minimize", "to minimize validation/loss"),
        ("", "validation/accuracy minimize", "to maximize validation/accuracy"),
        ("x", "", "--direction belong together"),
        ("x maximize", "", "has no 'x': set --metric"),
    ],
)
def test_a_metric_that_does_not_fit_is_named(
    full_project: Path, tmp_path: Path, first: str, then: str, complaint: str
) -> None:
    """At once, or in a study that was started with another one; all trials of that failed."""

    def flags(text: str) -> list[str]:
        pairs = zip(("metric", "direction"), text.split(), strict=False)
        return [f"--{name}={value}" for name, value in pairs]

    launch = "exit 3" if then else ""
    assert sweep(full_project, tmp_path, *flags(first), launch=launch).wait(PATIENCE) == 1
    if then:
        log = (tmp_path / "log").read_text().splitlines()
        assert log[-1].startswith("all trials failed: ")
        assert sweep(full_project, tmp_path, *flags(then)).wait(PATIENCE) == 1
    error = (tmp_path / "log").read_text().splitlines()[-1]
    assert error.startswith("error: ") and complaint in error


MISTAKES = """
import json, sys
from pathlib import Path
from demo.engine.errors import UsageError
from demo.tools.sweep import main
path = sys.argv[1]
for text in json.loads(sys.argv[2]):
    Path(path).write_text(text)
    try:
        main([f"--search={path}", f"--run-root={path}.runs", "--", "exit"])
    except UsageError as error:
        print(error)
"""


def test_a_mistake_in_the_search_space_is_named(full_project: Path, tmp_path: Path) -> None:
    said = {
        "": "names no setting",
        "- 3": "names no setting",
        "lr: 3": "lr is 3",
        "lr: {low: 1, high: 0.5}": "low <= high",
        "lr: {low: 0.1, high: 1, log: off}": "log is 'off'",
        "batch_size: [1:30]": "batch_size is '1:30'",
        "lr: [fast]": "lr is 'fast'",
        "learning_rate: [1]": "unknown setting 'learning_rate'",
    }
    path = tmp_path / "search.yaml"
    lines = python(full_project, MISTAKES, path, json.dumps([*said])).splitlines()
    for line, complaint in zip(lines, said.values(), strict=True):
        assert str(path) in line and complaint in line
    assert [*tmp_path.iterdir()] == [path], "no study was begun"
