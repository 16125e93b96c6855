"""What every tracker does, for each of them: what was logged is there, once, however a run ends."""

import json
import subprocess
import sys
from pathlib import Path

import metrics
import pytest

from ..conftest import PATIENCE, clean_environment
from . import TRACKERS, check_numbers, reader, show
from .conftest import Past

PICTURES = ("test/confusion_matrix", "test/predictions")

each_tracker = pytest.mark.parametrize("tracker", TRACKERS)


@each_tracker
def test_a_killed_and_resumed_run_is_there_once_and_complete(resumed: Past, tracker: str) -> None:
    shown = show(tracker, resumed.run_dir)
    check_numbers(shown, resumed.run_dir, resumed.lost)
    names = {"train/loss", "train/lr", "train/gradient_norm", "train/samples_per_second"}
    names |= {"train/data_seconds", "system/memory_gib", "system/cpu_percent"}
    assert names | {"validation/accuracy", "test/accuracy"} <= shown.numbers.keys()
    assert {3, 195, 200} <= shown.numbers["train/loss"].keys()
    assert list(shown.numbers["test/accuracy"]) == [200]
    if shown.times is not None:
        lines = [line for line in metrics.read(resumed.run_dir) if "train/loss" in line]
        written = {line["step"]: line["time"] for line in lines}
        assert shown.times.keys() == shown.numbers["train/loss"].keys()
        for step in shown.times.keys() - set(resumed.lost):
            assert shown.times[step] == pytest.approx(written[step], rel=0, abs=0.002)

    assert (shown.experiment, sorted(shown.tags)) == ("trial", ["even", "odd"])
    assert str(shown.settings["max_steps"]) == "200"
    assert shown.provenance["world_size"] == 2
    assert (shown.status, shown.error) == ("finished", None)
    for name in PICTURES:
        ((step, size),) = shown.images[name].items()
        assert step == 200 and min(size) > 300
    if shown.histograms is not None:
        for name in ("parameters/layers.5.weight", "gradients/layers.5.weight"):
            counts = shown.histograms[name]
            assert list(counts) == [100, 200] and min(counts.values()) > 100
    assert "resuming from" in shown.texts["log"] and "test: loss" in shown.texts["log"]


@each_tracker
def test_a_killed_run_shows_what_was_logged_up_to_its_checkpoint(
    resumed: Past, tracker: str
) -> None:
    shown = resumed.before[tracker]
    assert shown.status in ("running", None)
    last = min(resumed.lost)
    assert [*range(3, last, 3)] == [s for s in shown.numbers["train/loss"] if s < last]


def test_no_secret_of_the_environment_is_in_a_file(resumed: Past) -> None:
    """Of a tracker or of the run."""
    files = [path for path in resumed.run_dir.parent.rglob("*") if path.is_file()]
    for tracker in TRACKERS:
        places = reader(tracker).places(resumed.run_dir)
        assert any(file.is_relative_to(place) for file in files for place in places), tracker
    assert not [path for path in files if b"correct-horse" in path.read_bytes()]
    assert "Traceback" not in resumed.log and "Warning" not in resumed.log, resumed.log


@each_tracker
def test_a_stopped_run_says_so_and_a_failed_run_says_why(
    failed: tuple[Path, Past], tracker: str
) -> None:
    stopped, run = failed
    shown = show(tracker, stopped)
    assert (shown.status, shown.error) == ("preempted", None)
    check_numbers(shown, stopped)

    shown = show(tracker, run.run_dir)
    error = json.loads((run.run_dir / "status.json").read_text())["error"]
    assert "train/loss is" in error
    assert (shown.status, shown.error) == ("failed", error)
    check_numbers(shown, run.run_dir)


@each_tracker
def test_what_came_after_the_step_that_a_run_goes_on_from_is_gone(
    scripted: tuple[Path, list], tracker: str
) -> None:
    """Or stays, and is not there twice."""
    runs = {shown.name: shown for shown in reader(tracker).runs(scripted[0])}
    for step in (0, 20):
        shown = runs[f"trial/from-{step}"]
        kept = [s for s in range(3, 40, 3) if s <= step or shown.keeps]
        steps = sorted({*kept, 25, 30})
        numbers = {
            "early": {s: s for s in steps if s <= 20 or s in (25, 30)},
            "loss": {s: -s if s in kept else s for s in steps},
        }
        if shown.keeps:
            numbers["late"] = {s: s for s in kept if s > 20}
        assert shown.numbers == numbers, step
    assert tracker not in scripted[1], "a histogram has switched it off"
    if (histograms := runs["trial/odd"].histograms) is not None:
        assert {*histograms["odd"]} >= {0, 1, 2, 3, 4, 5, 7}  # all with a finite value


@each_tracker
def test_a_tracker_that_cannot_write_stops_no_training_and_sync_makes_up_for_it(
    blocked: Past, tracker: str
) -> None:
    log, still, done, more = blocked.said
    for said in (log, still):
        assert f"tracker {tracker} could not" in said
        assert f"sync {blocked.run_dir}'" in said
    assert "Traceback" not in log
    assert tracker in done.partition(f"{blocked.run_dir}: ")[2] and "all data now" in done
    key = getattr(reader(tracker), "KEY", None)
    assert (f"{key} is not set" if key else f"{tracker} has all data") in more
    shown = show(tracker, blocked.run_dir)
    check_numbers(shown, blocked.run_dir)
    assert list(shown.numbers["train/loss"]) == [5, 10, 15, 20]
    assert (shown.status, shown.error) == ("finished", None)


WRITER = """
import sys, time
from pathlib import Path
from demo.trackers import Run, select
from demo.trackers.dispatch import Trackers
store, me, names = Path(sys.argv[1]), sys.argv[2], select(sys.argv[3:])
(store.parent / me).touch()
while len(list(store.parent.glob("writer*"))) < 4:
    time.sleep(0.01)
for attempt in "ab":
    folder = store / f"{me}-{attempt}"
    folder.mkdir(parents=True)
    experiment = "trial" if attempt == "a" else f"of {me}"
    name = f"{store.name}/{folder.name}"
    trackers = Trackers(names, Run(folder, store, name, experiment, {"me": me}, tags=(me, "all")))
    for step in range(1, 101):
        numbers = {"loss": 1 / step, "accuracy": step / 100}
        trackers.call("log_metrics", numbers, step, time.time())
        if step % 25 == 0:
            trackers.call("flush")
    assert not trackers.finish("finished", seconds=300)
"""


@each_tracker
@pytest.mark.slow
def test_four_jobs_that_start_at_once_share_a_store(
    full_project: Path, tmp_path: Path, tracker: str
) -> None:
    """And leave nothing behind, such as a lock or a half-made store."""
    store = tmp_path / "trial"
    env = clean_environment(full_project)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, store, f"writer{number}", tracker], env=env)
        for number in range(4)
    ]
    assert [writer.wait(PATIENCE) for writer in writers] == [0] * 4
    found = sorted(reader(tracker).runs(store), key=lambda shown: shown.name)
    folders = [f"writer{number}-{attempt}" for number in range(4) for attempt in "ab"]
    assert [each.name for each in found] == [f"trial/{folder}" for folder in folders]
    for each, folder in zip(found, folders, strict=True):
        me, _, attempt = folder.partition("-")
        assert each.experiment == ("trial" if attempt == "a" else f"of {me}")
        assert sorted(each.tags) == ["all", me]
        assert (each.settings["me"], each.status) == (me, "finished")
        assert each.numbers == {
            "loss": pytest.approx({s: 1 / s for s in range(1, 101)}, rel=each.precision, abs=0),
            "accuracy": pytest.approx(
                {s: s / 100 for s in range(1, 101)}, rel=each.precision, abs=0
            ),
        }
    made = {place.name for place in reader(tracker).places(store / "run")}
    made = {name for name in made if not name.endswith(".lock")}
    assert {path.name for path in store.iterdir()} <= made | {*folders}
