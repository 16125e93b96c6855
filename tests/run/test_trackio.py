"""What was logged to trackio is there, read with trackio's own reader and server."""

import json
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from .conftest import PACED, PATIENCE, Job, clean_environment, srun

SHORT = ("--max-steps=200", "--checkpoint-every=20", "--log-every=5", "--trackers=trackio")
# trackio finds its folder at its import, so each reader is a process.
READ = """
import json, sys, trackio
from trackio import fragments, server
from trackio.sqlite_storage import SQLiteStorage
project, moved = sys.argv[1], fragments.import_inbox_dir()
runs = {}
for run in trackio.Api().runs(project):
    logs = SQLiteStorage.get_logs(project, run.name, run_id=run.id)
    runs[run.name] = {"id": run.id, "config": run.config, "logs": logs, "alerts": run.alerts()}
files = {each["name"]: open(each["path"]).read() for each in server.get_project_files(project)}
print(json.dumps({"runs": runs, "files": files, "moved": moved}))
"""
OFFLINE = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "https", "all")}


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the tests use no store of the user who runs them."""
    monkeypatch.delenv("TRACKIO_DIR", raising=False)


def read(folder: Path, project: str = "trial") -> dict[str, Any]:
    """Return what trackio shows about a project."""
    env = {**clean_environment(folder), **OFFLINE, "TRACKIO_DIR": str(folder)}
    command = [sys.executable, "-c", READ, project]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def values(run: dict[str, Any]) -> dict[str, list[tuple[int, Any]]]:
    """Return all values of a run by name, with their steps, in the order of the steps."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for line in run["logs"]:
        for name in line.keys() - {"step", "timestamp"}:
            found.setdefault(name, []).append((line["step"], line[name]))
    return {name: sorted(each, key=lambda pair: pair[0]) for name, each in found.items()}


def logged(job: Job) -> dict[str, list[tuple[int, float]]]:
    """Return the content of metrics.jsonl in the same form."""
    found: dict[str, list[tuple[int, float]]] = {}
    for line in job.metrics():
        for name in line.keys() - {"step", "time"}:
            found.setdefault(name, []).append((line["step"], line[name]))
    return found


def numbers(run: dict[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Return those of the values that are numbers."""
    found = values(run)
    return {name: each for name, each in found.items() if not isinstance(each[0][1], dict)}


@pytest.mark.parametrize("served", ["meanwhile", "never"])
def test_everything_is_there_once_of_a_resumed_run(
    full_project: Path, tmp_path: Path, served: str
) -> None:
    """Whether or not a server has moved the first attempt's files."""
    flags = (*SHORT, f"--run-root={tmp_path}", "--experiment=trial", "--histograms-every=100")
    env = {**OFFLINE, "API_TOKEN": "correct-horse"}
    run_dir, store = tmp_path / "trial/run", tmp_path / "trial/trackio"
    stopped = srun(full_project, run_dir, 1, *flags, "--tags", "odd", **env, **PACED)
    stopped.interrupt(30, "trackio")
    if served == "meanwhile":
        killed = read(store)["runs"]["trial/run"]
        assert killed["config"]["status"] == "running"
        # What was logged up to a checkpoint is there, though the process was killed.
        assert [step for step, _ in values(killed)["train/loss"]][:4] == [5, 10, 15, 20]
    job = srun(full_project, run_dir, 1, *flags, "--tags", "odd", **env).wait()
    assert job.summary["resumed_from_step"]

    shown = read(store)
    assert list(shown["runs"]) == ["trial/run"]
    run = shown["runs"]["trial/run"]
    assert run["id"] == json.loads((run_dir / "trackers.json").read_text())["trackio"]
    assert numbers(run) == logged(job)
    times = [(each["step"], seconds(each)) for each in run["logs"] if "train/loss" in each]
    measured = [(each["step"], each["time"]) for each in job.metrics() if "train/loss" in each]
    assert sorted(times) == [(step, pytest.approx(at, rel=0, abs=0.002)) for step, at in measured]
    config = run["config"]
    assert (config["status"], config["error"], config["max_steps"]) == ("finished", None, 200)
    assert (config["tags"], config["_Group"]) == (["odd"], "trial")
    assert config["provenance"]["world_size"] == 1
    for picture in ("test/confusion_matrix", "test/predictions"):
        ((step, image),) = values(run)[picture]
        assert step == 200 and (store / "media" / image["file_path"]).read_bytes()[1:4] == b"PNG"
    histograms = values(run)["gradients/layers.5.weight"]
    assert [(step, sum(each["values"]) > 100) for step, each in histograms] == [
        (100, True),
        (200, True),
    ]
    log = shown["files"]["trial/run/log.txt"]
    assert "resuming from" in log and "test: loss" in log
    everything = "".join(path.read_text(errors="replace") for path in store.rglob("*.*"))
    assert "correct-horse" not in json.dumps(shown) + everything
    assert read(store)["moved"] == 0


def seconds(line: dict[str, Any]) -> float:
    """Return the time of a line, in seconds since 1970."""
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def test_a_failed_run_says_why(full_project: Path, tmp_path: Path) -> None:
    flags = (*SHORT, f"--run-root={tmp_path}", "--experiment=trial", "--lr=1e9")
    job = srun(full_project, tmp_path / "trial/run", 1, *flags).wait()
    assert job.codes == [1]
    run = read(tmp_path / "trial/trackio")["runs"]["trial/run"]
    error = json.loads((job.run_dir / "status.json").read_text())["error"]
    assert "train/loss is" in error
    assert (run["config"]["status"], run["config"]["error"]) == ("failed", error)
    assert [(each["title"], each["text"]) for each in run["alerts"]] == [("failed", error)]


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


@pytest.mark.parametrize("mode", ["server", "none"])
def test_four_jobs_that_start_at_once_share_a_folder(
    full_project: Path, tmp_path: Path, mode: str
) -> None:
    """Also while a server moves what they write."""
    store = tmp_path / "store"
    env = clean_environment(full_project)
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, store, f"writer{number}"], env=env)
        for number in range(4)
    ]
    deadline = time.monotonic() + PATIENCE
    while mode == "server" and any(writer.poll() is None for writer in writers):
        assert time.monotonic() < deadline
        if (store / "trackio/inbox").exists():
            read(store / "trackio")
    assert [writer.wait(PATIENCE) for writer in writers] == [0] * 4
    runs = read(store / "trackio")["runs"]
    assert sorted(runs) == [f"writer{number}{attempt}" for number in range(4) for attempt in "ab"]
    for name, run in runs.items():
        shown = values(run)
        assert shown["loss"] == [(step, 1 / step) for step in range(1, 101)]
        assert [step for step, _ in shown["odd"]] == list(range(1, 101))
        assert {str(number) for _, number in shown["odd"]} == {"nan", "-inf"}
        ((_, table),) = shown["table"]
        assert table["_value"] == [{"a": 1, "b": "x"}, {"a": 2.0, "b": str(store)}]
        assert (run["config"]["tags"], run["config"]["status"]) == ([name[:-1]], "finished")
    assert not list((store / "trackio/inbox").glob("*/*"))


def test_a_folder_that_cannot_be_written_does_not_stop_training(
    full_project: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    flags = (*SHORT, f"--run-root={tmp_path}", "--experiment=trial", "--max-steps=20")
    folder = {"TRACKIO_DIR": str(tmp_path / "file/folder")}
    job = srun(full_project, tmp_path / "trial/run", 1, *flags, **folder).wait()
    assert job.codes == [0], job.log
    assert "tracker trackio could not start and is off (" in job.log
    sync = [sys.executable, "-m", "demo", "sync", str(job.run_dir)]
    env = clean_environment(full_project)
    done = subprocess.run(sync, cwd=full_project, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = read(tmp_path / "trial/trackio")["runs"]["trial/run"]
    assert numbers(run) == logged(job)
    assert run["config"]["status"] == "finished"


ODD = """
import json, pathlib, sys, time
import numpy as np
from demo.trackers import Run
from demo.trackers.trackio import Tracker, project
store, names = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
settings = {"seed": 2**70, "lowest": -(2**63), "name": chr(0xD800)}
for name in names:
    tracker = Tracker(Run(store, store, name or "run", name, settings))
    tracker.log_metrics({"loss": 1.0}, 1, time.time())
    tracker.log_text("note", "half " + chr(0xD800), 1)
    tracker.finish("failed", "no " + chr(0xD800))
print(json.dumps([project(name) for name in names]))
"""


def odd(project: Path, store: Path, *experiments: str) -> list[str]:
    """Return the projects of experiments, after a run of each that logs what is hard to write."""
    command = [sys.executable, "-c", ODD, str(store), json.dumps(experiments)]
    env = {**clean_environment(project), "TRACKIO_DIR": str(store)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_experiment_has_a_project_of_its_own(full_project: Path, tmp_path: Path) -> None:
    """Also those whose names trackio refuses, or takes for the same."""
    names = ["a_configs", "a_artifacts", "registry-a", "regi.stry", "a.b", "ab", "...", "default"]
    projects = odd(full_project, tmp_path, *names)
    assert (projects[5], projects[7]) == ("ab", "default")
    for name, project in zip(names, projects, strict=True):
        runs = read(tmp_path, project)["runs"]
        assert list(runs) == [name]
        assert values(runs[name])["loss"] == [(1, 1.0)]


def test_what_cannot_be_written_costs_nothing_else(full_project: Path, tmp_path: Path) -> None:
    """Half of a surrogate pair, and integers above 64 bits."""
    (project,) = odd(full_project, tmp_path, "trial")
    shown = read(tmp_path, project)
    run = shown["runs"]["trial"]
    assert values(run)["loss"] == [(1, 1.0)]
    config = run["config"]
    assert (config["seed"], config["lowest"], config["name"]) == (str(2**70), -(2**63), "?")
    assert (config["status"], config["error"]) == ("failed", "no ?")
    assert [each["text"] for each in run["alerts"]] == ["no ?"]
    assert shown["files"]["trial/note.txt"] == "half ?"


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
    env = {**clean_environment(full_project), "TRACKIO_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.stdout.strip() == "{'loss': {2: 2.0}}", done.stderr
