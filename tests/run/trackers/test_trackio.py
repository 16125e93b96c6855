"""What only trackio does: a server moves what runs write, and other clients may write there too."""

import json
import subprocess
import sys
import time
from pathlib import Path

from ..conftest import PATIENCE, clean_environment, python
from .conftest import Past
from .trackio import read, values


def test_a_failed_run_has_an_alert(failed: tuple[Path, Past]) -> None:
    run_dir = failed[1].run_dir
    run = read(run_dir.parent / "trackio")["projects"]["trial"]["runs"]["trial/run"]
    assert run["id"] == json.loads((run_dir / "trackers.json").read_text())["trackio"]
    error = json.loads((run_dir / "status.json").read_text())["error"]
    assert [(each["title"], each["text"]) for each in run["alerts"]] == [("failed", error)]
    assert read(run_dir.parent / "trackio")["moved"] == 0


WRITER = """
import pathlib, sys, time
import numpy as np
from demo.trackers import Run
from demo.trackers.trackio import Tracker
store, name = pathlib.Path(sys.argv[1]), sys.argv[2]
(store.parent / name).touch()
while len(list(store.parent.glob("writer*"))) < 4:
    time.sleep(0.01)
for attempt in "ab":
    tracker = Tracker(Run(store / name, store, name + attempt, "trial", tags=(name,)))
    tracker.LINES = 7
    for step in range(1, 101):
        values = {"loss": 1 / step, "odd": float("nan" if step % 2 else "-inf")}
        tracker.log_metrics(values, step, time.time())
    tracker.log_table("table", ["a", "b"], [[1, "x"], [np.float32(2), store]], 100)
    tracker.finish("finished", None)
"""


def test_a_server_may_move_what_four_jobs_write(full_project: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    env = clean_environment(full_project)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, store, f"writer{number}"], env=env)
        for number in range(4)
    ]
    deadline = time.monotonic() + PATIENCE
    while any(writer.poll() is None for writer in writers):
        assert time.monotonic() < deadline
        if (store / "trackio/inbox").exists():
            read(store / "trackio")
    assert [writer.wait() for writer in writers] == [0] * 4
    runs = read(store / "trackio")["projects"]["trial"]["runs"]
    assert sorted(runs) == [f"writer{number}{attempt}" for number in range(4) for attempt in "ab"]
    for name, run in runs.items():
        shown = values(run)
        assert shown["loss"] == {step: 1 / step for step in range(1, 101)}
        assert list(shown["odd"]) == list(range(1, 101))
        assert {str(number) for number in shown["odd"].values()} == {"nan", "-inf"}
        assert shown["table"][100]["_value"] == [{"a": 1, "b": "x"}, {"a": 2.0, "b": str(store)}]
        assert (run["config"]["tags"], run["config"]["status"]) == ([name[:-1]], "finished")
    assert not list((store / "trackio/inbox").glob("*/*"))


ODD = """
import json, pathlib, sys, time
import numpy as np
from demo.trackers import Run
from demo.trackers.trackio import Tracker, project
store, names = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
settings = {"seed": 2**70, "lowest": -(2**63), "name": chr(0xD800)}
for name in names:
    tracker = Tracker(Run(store, store, name, name, settings))
    tracker.log_metrics({"loss": 1.0}, 1, time.time())
    tracker.log_text("note", "half " + chr(0xD800), 1)
    tracker.finish("failed", "no " + chr(0xD800))
print(json.dumps([project(name) for name in names]))
"""


def test_each_experiment_has_a_project_of_its_own_and_what_cannot_be_written_costs_nothing_else(
    full_project: Path, tmp_path: Path
) -> None:
    """Names that trackio refuses or takes for the same; half of a surrogate pair; big integers."""
    names = ["a_configs", "a_artifacts", "registry-a", "regi.stry", "a.b", "ab", "...", "default"]
    said = python(full_project, ODD, tmp_path, json.dumps(names), TRACKIO_DIR=str(tmp_path))
    projects = json.loads(said)
    assert (projects[5], projects[7]) == ("ab", "default")
    found = read(tmp_path)["projects"]
    for name, project in zip(names, projects, strict=True):
        ((shown, run),) = found[project]["runs"].items()
        assert shown == name and values(run)["loss"] == {1: 1.0}
        config = run["config"]
        assert (config["seed"], config["lowest"], config["name"]) == (str(2**70), -(2**63), "?")
        assert (config["status"], config["error"]) == ("failed", "no ?")
        assert [each["text"] for each in run["alerts"]] == ["no ?"]
        assert found[project]["files"][f"{name}/note.txt"] == "half ?"


def test_lines_of_other_clients_are_no_history(full_project: Path, tmp_path: Path) -> None:
    inbox = tmp_path / "inbox/given-1"
    inbox.mkdir(parents=True)
    line = {"kind": "metric", "project": "trial", "run": "run", "run_id": "given"}
    odd_ones = ({}, {"metrics": {"loss": 1.0}}, {"step": 1, "metrics": None})
    good = {"step": 2, "metrics": {"loss": 2.0}}
    lines = (json.dumps(line | each) + "\n" for each in (*odd_ones, good))
    (inbox / "00000000.jsonl").write_text("".join(lines))
    code = (
        "import pathlib, sys; from demo.trackers import Run; from demo.trackers.trackio import *\n"
        "store = pathlib.Path(sys.argv[1])\n"
        "print(Tracker(Run(store, store, 'run', 'trial', run_id='given')).history())\n"
    )
    said = python(full_project, code, tmp_path, TRACKIO_DIR=str(tmp_path))
    assert said.strip() == "{'loss': {2: 2.0}}"
