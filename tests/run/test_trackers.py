"""No tracker stops or delays a run; trackers are chosen; `sync` sends later what one missed."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from renderer import render_project

from .conftest import PACED, QUICK, Launch, clean_environment, command, python, srun
from .trackers import TRACKERS

SHORT = ("--max-steps=200", "--checkpoint-every=20", "--log-every=5")


class Recorder:
    """A tracker that fails or hangs at a chosen call, and records the successful calls before."""

    at = ""
    trouble: Exception | threading.Event | None = None
    held: dict[str, dict[int, float]]

    def __init__(self, run: object) -> None:
        self.run_id = "recorder"
        type(self).done = self.done = []
        self._call("start")

    def _call(self, name: str) -> None:
        if name == self.at and isinstance(self.trouble, threading.Event):
            self.trouble.wait()
        elif name == self.at:
            raise self.trouble
        self.done.append(name)

    def history(self) -> dict[str, dict[int, float]]:
        return type(self).held

    def log_metrics(self, metrics: dict[str, float], step: int, time: float) -> None:
        self._call("log_metrics")
        self.done[-1] = (step, metrics)

    def log_text(self, name: str, text: str, step: int) -> None:
        self._call("log_text")

    def flush(self) -> None:
        self._call("flush")

    def finish(self, status: str, error: str | None) -> None:
        self._call("finish")


@pytest.fixture
def recorders(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, type[Recorder]]:
    """Two trackers of the project, `broken` and `sound`."""
    made = {}
    for name in ("broken", "sound"):
        module = ModuleType(f"demo.trackers.{name}")
        made[name] = module.Tracker = type("Tracker", (Recorder,), {"held": {}})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return made


def make_run(folder: Path, **facts: object) -> object:
    """Return the description of a run for a tracker."""
    run = import_module("demo.trackers").Run
    return run(directory=folder, store=folder, name="run", experiment="trial", **facts)


@pytest.mark.parametrize("at", ["start", "log_metrics", "flush", "finish"])
def test_a_tracker_that_fails_is_off_and_the_others_go_on(
    recorders: dict[str, type[Recorder]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    at: str,
) -> None:
    monkeypatch.setenv("BROKEN_API_KEY", "correct-horse")
    broken = recorders["broken"]
    broken.at, broken.trouble = at, OSError("correct-horse at https://me:battery@example.org")
    trackers = import_module("demo.trackers.dispatch").Trackers(
        ["broken", "sound"], make_run(tmp_path)
    )
    for step in (1, 2):
        trackers.call("log_metrics", {"loss": 1.0}, step, 0.0)
        trackers.call("flush")
    assert trackers.finish("finished") == ["broken"]

    metrics = [(step, {"loss": 1.0}) for step in (1, 2)]
    assert recorders["sound"].done == ["start", metrics[0], "flush", metrics[1], "flush", "finish"]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage().startswith("tracker broken ")
    fault = "OSError: <BROKEN_API_KEY> at https://<login>@example.org"
    assert fault in record.getMessage() and "\n" not in record.getMessage()
    assert f"sync {tmp_path}' sends" in record.getMessage()
    assert f"{__file__}:" in record.getMessage(), "where it failed"
    assert "battery" not in caplog.text and "correct-horse" not in caplog.text


@pytest.mark.parametrize("at", ["start", "log_metrics", "flush", "finish"])
def test_a_tracker_that_hangs_is_left_behind(
    recorders: dict[str, type[Recorder]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    at: str,
) -> None:
    dispatch = import_module("demo.trackers.dispatch")
    monkeypatch.setattr(dispatch, "FINISH_SECONDS", {"finished": 0.2})
    stuck = threading.Event()
    recorders["broken"].at, recorders["broken"].trouble = at, stuck
    trackers = dispatch.Trackers(["broken", "sound"], make_run(tmp_path))
    for step in range(1, 51):
        trackers.call("log_metrics", {"loss": 1.0}, step, 0.0)
        trackers.call("flush")
    trackers.finish("finished")
    assert dispatch.left_behind()
    stuck.set()

    assert len(recorders["sound"].done) == 1 + 2 * 50 + 1
    messages = [record.getMessage() for record in caplog.records]
    # Neither a line nor a flush waits for a tracker; only the end does.
    (line,) = [line for line in messages if "tracker broken" in line]
    assert "within 0.2 seconds" in line and f"'python -m demo sync {tmp_path}'" in line


def test_what_a_tracker_has_is_not_logged_again_and_what_it_lacks_is(
    recorders: dict[str, type[Recorder]], tmp_path: Path
) -> None:
    dispatch = import_module("demo.trackers.dispatch")
    dispatch.note_id(tmp_path, "sound", "recorder")
    # The interrupted run came to step 4, its checkpoint is of step 3; step 2 was lost.
    recorders["sound"].held = {"loss": {1: 1.0, 3: 3.0, 4: 4.0}}
    earlier = [{"step": step, "time": 7.0, "loss": float(step)} for step in (1, 2, 3)]
    trackers = dispatch.Trackers(["sound"], make_run(tmp_path, resume_step=3), earlier)
    for step in (4, 5):
        trackers.call("log_metrics", {"loss": float(step), "lr": 0.1}, step, 0.0)
    trackers.finish("finished")
    assert recorders["sound"].done[1:-1] == [
        (2, {"loss": 2.0}),
        (4, {"lr": 0.1}),
        (5, {"loss": 5.0, "lr": 0.1}),
    ]


def test_sync_leaves_a_run_alone_that_trains(project: Path, tmp_path: Path) -> None:
    job = srun(
        project,
        tmp_path / "run",
        1,
        *SHORT,
        "--max-steps=100000",
        "--epochs=999",
        "--trackers=tensorboard",
        **PACED,
    )
    try:
        job.wait_for_tracker(20, "tensorboard")
        events = list((tmp_path / "run/tensorboard").iterdir())
        done = command(project, "sync", str(tmp_path))
        assert done.returncode == 0
        assert "run is training" in done.stderr
        assert list((tmp_path / "run/tensorboard").iterdir()) == events
    finally:
        job.kill()
    # Killed, it can't say so itself.
    assert "was killed" in command(project, "sync", str(tmp_path)).stderr


def test_check_trackers_tells_what_works(project: Path, tmp_path: Path) -> None:
    flags = ("--trackers=tensorboard", f"--run-root={tmp_path}/runs")
    good = command(project, "check-trackers", *flags)
    assert (good.returncode, good.stderr) == (0, "")
    assert good.stdout.startswith("tensorboard  ok      20 numbers")
    # A tracker that loses a number.
    (tmp_path / "sitecustomize.py").write_text(
        "import torch.utils.tensorboard as tb\n"
        "add = tb.SummaryWriter.add_scalar\n"
        "def lose(self, name, value, step, **rest):\n"
        "    if step != 7:\n"
        "        add(self, name, value, step, **rest)\n"
        "tb.SummaryWriter.add_scalar = lose\n"
    )
    path = f"{tmp_path}{os.pathsep}{project / 'src'}"
    bad = command(project, "check-trackers", *flags, PYTHONPATH=path)
    assert bad.returncode == 1
    assert "ValueError: check/loss at step 7 is" in bad.stdout


def test_dotenv_is_read_where_it_exists_and_the_environment_goes_first(
    project: Path, tmp_path: Path
) -> None:
    (tmp_path / ".env").write_text("MY_KEY=correct-horse\nOMP_NUM_THREADS=7\nWANDB_ENTITY=\n")
    code = (
        "import os, sys\n"
        "from demo.__main__ import main\n"
        "os.chdir(sys.argv[1])\n"
        "sys.argv = ['demo', 'train', '--help']\n"
        "try:\n"
        "    main()\n"
        "except SystemExit:\n"
        "    names = ('MY_KEY', 'OMP_NUM_THREADS', 'WANDB_ENTITY')\n"
        "    print([os.environ.get(name) for name in names])\n"
    )
    assert python(project, code, tmp_path).splitlines()[-1] == "['correct-horse', '1', None]"


WATCH = """
import os, runpy, sys, threading

def watch(event, arguments):
    if event == "os.putenv" and threading.current_thread() is not threading.main_thread():
        if os.fsdecode(arguments[0]) not in os.environ:
            print("added", arguments, flush=True)

sys.addaudithook(watch)
sys.argv[:1] = []
runpy.run_module("demo", run_name="__main__", alter_sys=True)
"""


def test_no_thread_adds_a_variable_to_the_environment(full_project: Path, tmp_path: Path) -> None:
    """While another thread reads one, that can crash the process."""
    flags = [*QUICK, f"--run-dir={tmp_path}/run", "--trackers", *TRACKERS]
    env = clean_environment(full_project)
    done = subprocess.run(
        [sys.executable, "-c", WATCH, "demo", "train", *flags],
        cwd=full_project,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0 and "added" not in done.stdout, done.stdout
    assert len(json.loads((tmp_path / "run/trackers.json").read_text())) == len(TRACKERS)


def test_none_silences_the_trackers_that_the_settings_name(project: Path, launch: Launch) -> None:
    assert "trackers: [tensorboard]" in (project / "configs" / "train.yaml").read_text()
    job = launch(1, "--trackers=none")
    assert not (job.run_dir / "tensorboard").exists()
    assert not (job.run_dir / "trackers.json").exists()
    # The run itself tells how it stands.
    state = json.loads((job.run_dir / "status.json").read_text())
    assert (state["status"], state["error"]) == ("finished", None)
    assert (state["step"], state["progress"], state["job"]) == (30, 1.0, "77")
    assert state["started"] < state["updated"] < time.time()


def test_an_unknown_tracker_is_named_in_one_line(launch: Launch) -> None:
    job = launch(1, "--trackers=tensorbord")
    assert job.codes == [1]
    (line,) = job.log.splitlines()
    assert "error: unknown tracker 'tensorbord'" in line and "has tensorboard;" in line


@pytest.mark.parametrize(
    "values",
    [[1.0, 2.0, 2.0], [1.0, 1 + 2e-16, 1.0], [-1e308, 1e308, 1e308], [0.0, 5e-324, 0.0]],
)
def test_a_histogram_counts_each_finite_value(project: Path, values: list[float]) -> None:
    binned = import_module("demo.engine.run.media").binned
    counts, edges = binned(np.array([*values, np.nan, -np.inf]))
    assert (counts.shape, edges.shape, counts.sum()) == ((64,), (65,), 3)
    assert (np.diff(edges) > 0).all() and np.isfinite(edges).all()
    if max(values) - min(values) > 0.5:
        assert (counts[0], counts[-1]) == (1, 2)


ASK = """
import asyncio, json, sys
from demo.tools.monitor.guard import Guard

async def ask(kind, password, headers):
    said = []
    async def send(message):
        said.append(message)
    async def page(scope, receive, send):
        await send({"status": 200})
    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    await Guard(page, "me", password)({"type": kind, "headers": named}, None, send)
    return said[0].get("status") or said[0]["type"]

print(json.dumps([asyncio.run(ask(*case)) for case in json.loads(sys.argv[1])]))
"""


def test_pages_answer_their_own_user_alone(tmp_path: Path) -> None:
    answers = {"trackers": ["trackio"], "monitoring_servers": ["trackio"], "launch_modes": ["cpu"]}
    project = render_project(tmp_path / "demo", **answers)
    tunnel, node = {"host": "localhost:8000"}, {"host": "n1:8000"}
    mine = node | {"authorization": "Basic bWU6d29yZA=="}  # me:word
    good = ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000")
    bad = ("", "evil.example", "localhost.evil.example:80", "localhost:80:x", "[::2]", "n1:8000")
    cases = [
        *((200, "", {"host": host}) for host in good),
        *((403, "", {"host": host}) for host in bad),
        (200, "", tunnel | {"origin": "http://localhost:8000"}),
        *((403, "", tunnel | {"origin": f"http://{at}"}) for at in ("localhost:9", "evil.example")),
        (403, "", tunnel | {"origin": "null"}),
        (403, "", tunnel | {"sec-fetch-site": "cross-site"}),
        (200, "word", mine),
        (200, "word", mine | {"authorization": "basic bWU6d29yZA=="}),
        (403, "word", mine | {"origin": "http://evil.example"}),
        (401, "word", node),
        *(
            (401, "word", node | {"authorization": login})
            for login in ("Bearer bWU6d29yZA==", "Basic bWU6Z3Vlc3M=", "Basic", "")
        ),
    ]
    for kind in ("http", "websocket"):
        asked = json.dumps([(kind, password, headers) for _, password, headers in cases])
        said = json.loads(python(project, ASK, asked))
        for (status, *case), answer in zip(cases, said, strict=True):
            closed = "websocket.close" if kind == "websocket" else status
            assert answer == (200 if status == 200 else closed), case
