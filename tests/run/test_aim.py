"""What was logged to Aim is there, read with Aim's own reader."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .conftest import PACED, PATIENCE, Job, clean_environment, free_port, srun

if TYPE_CHECKING:
    import aim

SHORT = ("--max-steps=200", "--checkpoint-every=20", "--log-every=5", "--trackers=aim")
AIM = Path(sys.executable).with_name("aim")


@pytest.fixture(autouse=True)
def _no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the tests out of the user's repository."""
    monkeypatch.delenv("AIM_REPO", raising=False)


def flags(tmp_path: Path, *more: str) -> tuple[str, ...]:
    """Return flags of a run whose experiment is the folder `trial`."""
    return (*SHORT, f"--run-root={tmp_path}", "--experiment=trial", *more)


def runs(repository: Path) -> list["aim.Run"]:
    """Return Aim's own view of the runs in a repository, by name."""
    import aim

    # The index is what Aim reads; its UI would make it, too.
    command = [AIM, "storage", "--repo", repository, "reindex", "-y"]
    subprocess.run(command, check=True, capture_output=True)
    repo = aim.Repo(str(repository))
    found = [aim.Run(each, repo=repo, read_only=True) for each in repo.list_all_runs()]
    return sorted(found, key=lambda run: run.name)


def series(run: "aim.Run", kind: str, name: str) -> tuple[list[int], list, list[float]]:
    """Return the steps, values and times of a metric in a run."""
    from aim.storage.context import Context

    steps, (values, _, times) = getattr(run, f"get_{kind}")(name, Context({})).data.items_list()
    order = sorted(range(len(steps)), key=steps.__getitem__)
    return tuple([column[i] for i in order] for column in (steps, values, times))


def metrics(run: "aim.Run") -> dict[str, dict[int, float]]:
    """Return all metrics of a run, by step."""
    found = {}
    for each in run.metrics():
        steps, (values, _, _) = each.data.numpy()
        assert len(set(steps)) == len(steps), each.name
        found[each.name] = dict(zip(steps.tolist(), values.tolist(), strict=True))
    return found


def logged(job: Job) -> dict[str, dict[int, float]]:
    """Return the content of metrics.jsonl in the same form."""
    found: dict[str, dict[int, float]] = {}
    for line in job.metrics():
        for name in line.keys() - {"step", "time"}:
            found.setdefault(name, {})[line["step"]] = line[name]
    return found


def start_script(project: Path, script: str, *arguments: object) -> subprocess.Popen:
    """Start a script that uses the tracker itself."""
    head = "import sys, time, dataclasses, pathlib\nfrom demo.trackers import Run\n"
    head += "from demo.trackers.aim import Tracker\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + script, *map(str, arguments)], env=clean_environment(project)
    )


@contextmanager
def server(repository: Path, port: str) -> Iterator[subprocess.Popen]:
    """Serve a repository, with all that belongs to the server in a process group."""
    command = [AIM, "server", "--repo", repository, "--host", "127.0.0.1", "--port", port, "-y"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/status/", timeout=10).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen) -> None:
    """Kill a server."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_everything_is_there_once_of_a_resumed_run(full_project: Path, tmp_path: Path) -> None:
    more = ("--tags", "odd", "even", "--histograms-every=100")
    secret = {"API_TOKEN": "correct-horse"}
    first = flags(tmp_path, *more, "--log-every=3")
    stopped = srun(full_project, tmp_path / "trial/run", 1, *first, **secret, **PACED)
    stopped.interrupt(30, "aim")
    job = srun(full_project, tmp_path / "trial/run", 1, *flags(tmp_path, *more), **secret).wait()
    assert job.summary["resumed_from_step"]

    (run,) = runs(tmp_path / "trial")
    assert metrics(run) == logged(job)
    names = {"train/loss", "train/lr", "train/gradient_norm", "train/samples_per_second"}
    names |= {"system/memory_gib", "system/cpu_percent", "validation/accuracy", "test/accuracy"}
    assert names <= logged(job).keys()
    assert 3 in logged(job)["train/loss"] and 195 in logged(job)["train/loss"]
    _, _, times = series(run, "metric", "train/loss")
    written = [line["time"] for line in job.metrics() if "train/loss" in line]
    assert times == pytest.approx(written, rel=0, abs=0.002)

    assert (run.name, run.experiment) == ("trial/run", "trial")
    assert sorted(run.tags) == ["even", "odd"]
    assert run["settings", "max_steps"] == 200
    assert run["provenance", "world_size"] == 1
    assert any(each.startswith("torch==") for each in run["provenance", "packages"])
    assert (run["status"], run["error"], run.active) == ("finished", None, False)
    assert "correct-horse" not in str(run[...])
    (told,) = (tmp_path / "trial/.aim/check_ins").glob(f"{run.hash}-*-finished-*")
    assert told.name.endswith("-00000")

    for picture in ("test/confusion_matrix", "test/predictions"):
        steps, (image,), _ = series(run, "image_sequence", picture)
        assert steps == [200] and min(image.size) > 300
    steps, histograms, _ = series(run, "distribution_sequence", "gradients/layers.5.weight")
    assert steps == [100, 200]
    assert [each.weights.sum() > 100 for each in histograms] == [True, True]
    lines = [line.data for line in run.get_terminal_logs().data.values_list()[0]]
    assert any("resuming from" in line for line in lines)
    assert any("test: loss" in line for line in lines)


def test_a_failed_run_says_why(full_project: Path, tmp_path: Path) -> None:
    job = srun(full_project, tmp_path / "trial/run", 1, *flags(tmp_path, "--lr=1e9")).wait()
    assert job.codes == [1]
    (run,) = runs(tmp_path / "trial")
    error = json.loads((job.run_dir / "status.json").read_text())["error"]
    assert "train/loss is" in error
    assert (run["status"], run["error"], run.active) == ("failed", error, False)
    # What Aim's watcher goes by: it tells of a run whose next sign of life is overdue.
    (last,) = (tmp_path / "trial/.aim/check_ins").glob(f"{run.hash}-*-check_in-*")
    assert last.name.endswith("-00001")
    assert not list((tmp_path / "trial/.aim/check_ins").glob(f"{run.hash}-*-finished-*"))
    assert [each.message for each in run.get_log_records().data.values_list()[0]] == [error]


def test_the_names_that_aim_does_not_document_are_there(tmp_path: Path) -> None:
    """Those that trackers/aim.py and tools/monitor/aim.py use; the tests below use what they do."""
    import aim
    from aim.cli.server import commands as server
    from aim.cli.up import commands as up
    from aim.ext.cleanup import AutoClean
    from aim.ext.transport.client import Client

    repo = aim.Repo.from_path(str(tmp_path), init=True)
    options = {"system_tracking_interval": None, "log_system_params": False}
    run = aim.Run(repo=repo, capture_terminal_logs=False, **options)
    run.track(1.0, name="loss", step=1)
    for owner, names in (
        (AutoClean, "_registered_with_atexit"),
        (Client, "client_heartbeat get_queue"),
        (repo, "_client is_remote_repo"),
        (run, "_tracker meta_run_tree series_run_trees"),
        (run._tracker, "_track sequence_infos"),
        (server, "build_uvicorn_command"),
        (up, "build_uvicorn_command"),
    ):
        for name in names.split():
            assert hasattr(owner, name), f"Aim {aim.__version__} has no {owner}.{name}"
    ((context, traces),) = run.meta_run_tree.get("traces", {}).items()
    assert traces["loss"]["version"] == 2, f"Aim {aim.__version__} has another format"
    series = run.series_run_trees[2].subtree((context, "loss"))
    values, steps = (dict(series.subtree(part).items()) for part in ("val", "step"))
    assert list(values.values()) == [1.0] and list(steps.values()) == [1]
    run.close()


WRITER = """
store, name = pathlib.Path(sys.argv[1]), sys.argv[2]
(store.parent / name).touch()
while len(list(store.parent.glob("writer*"))) < 4:
    time.sleep(0.01)
for attempt in "ab":
    run = Run(store / name, store, name + attempt, f"of {name}", tags=(name, "all"))
    tracker = Tracker(run)
    for step in range(1, 101):
        tracker.log_metrics({"loss": 1 / step, "accuracy": step / 100}, step, time.time())
    tracker.finish("finished", None)
"""


@pytest.mark.slow
def test_four_jobs_that_start_at_once_share_a_repository(
    full_project: Path, tmp_path: Path
) -> None:
    names = [f"writer{number}" for number in range(4)]
    writers = [start_script(full_project, WRITER, tmp_path / "store", name) for name in names]
    assert [writer.wait(PATIENCE) for writer in writers] == [0] * 4
    found = runs(tmp_path / "store")
    assert [run.name for run in found] == [name + attempt for name in names for attempt in "ab"]
    for run in found:
        assert run.experiment == f"of {run.name[:-1]}"
        assert sorted(run.tags) == ["all", run.name[:-1]]
        assert metrics(run) == {
            "loss": {step: 1 / step for step in range(1, 101)},
            "accuracy": {step: step / 100 for step in range(1, 101)},
        }
    assert not list((tmp_path / "store").glob(".aim-*"))


RESUMER = """
import aim, os
store = pathlib.Path(sys.argv[1])
made, alone = aim.Run, []
def watched(*arguments, **named):
    alone.append((store / ".aim/new_run.lock").exists())
    return made(*arguments, **named)
aim.Run = watched
first = Tracker(Run(store / "run", store, "run", "trial"))
for step in range(3, 40, 3):
    first.log_metrics({"loss": -step, "late" if step > 20 else "early": step}, step, 7.0)
first.finish("failed", "killed")
locks = [store / ".aim" / name for name in ("new_run.lock", "locks/structured_db_lock")]
for lock in locks:  # of holders that died on another machine
    lock.write_text("1\\nelsewhere\\n")
    os.utime(lock, (0, 0))
gone = Run(store / "run", store, "gone", "trial", run_id="0" * 24, resume_step=20)
Tracker(gone).finish("finished", None)
run = Run(store / "run", store, "run", "trial", run_id=first.run_id, resume_step=20)
second = Tracker(run)
assert second.history() == {
    "loss": {step: -step for step in range(3, 20, 3)},
    "early": {step: step for step in range(3, 20, 3)},
    "late": {},
}
for step in (25, 30):
    second.log_metrics({"loss": step, "early": step}, step, 8.0)
second.finish("finished", None)
assert alone == [True, True, False]  # new runs write what all share
"""


def test_what_came_after_the_step_that_a_run_goes_on_from_is_gone(
    full_project: Path, tmp_path: Path
) -> None:
    assert start_script(full_project, RESUMER, tmp_path).wait(PATIENCE) == 0
    gone, run = runs(tmp_path)
    assert (gone.name, run.name, run.experiment) == ("gone", "run", "trial")
    early = {step: step for step in [*range(3, 20, 3), 25, 30]}
    assert metrics(run) == {
        "early": early,
        "loss": {step: step if step > 20 else -step for step in early},
    }
    about = {each["name"]: each["values"] for each in run.collect_sequence_info("metric")["metric"]}
    assert about.keys() == {"early", "loss"}
    shown = [about["loss"][key] for key in ("first_step", "last_step", "last", "min", "max")]
    assert shown == [3, 30, 30, -18, 30]


def test_a_server_that_is_not_there_does_not_stop_training(
    full_project: Path, tmp_path: Path
) -> None:
    address = f"aim://me:battery@127.0.0.1:{free_port()}"
    mine = flags(tmp_path)
    job = srun(full_project, tmp_path / "trial/run", 1, *mine, AIM_REPO=address).wait()
    assert job.codes == [0], job.log
    assert list(logged(job)["train/loss"]) == list(range(5, 201, 5))
    assert "tracker aim could not start and is off (" in job.log
    assert "'python -m demo sync" in job.log and "Traceback" not in job.log
    assert "battery" not in job.log
    assert not (tmp_path / "trial/.aim").exists()


@pytest.mark.slow
def test_a_server_gets_everything_also_after_it_died(full_project: Path, tmp_path: Path) -> None:
    port = free_port()
    where = {"AIM_REPO": f"aim://127.0.0.1:{port}"}
    mine = flags(tmp_path, "--max-steps=600", "--epochs=3")
    (tmp_path / "served").mkdir()
    with server(tmp_path / "served", port) as process:
        stopped = srun(full_project, tmp_path / "trial/run", 1, *mine, **where, **PACED)
        stopped.interrupt(30, "aim")
        job = srun(full_project, tmp_path / "trial/run", 1, *mine, **where, STEP_SECONDS="0.03")
        job.wait_for_step(100)
        stop(process)
    assert job.wait().summary["resumed_from_step"]
    assert list(logged(job)["train/loss"]) == list(range(5, 601, 5))
    assert f"sync {job.run_dir}' sends the missing data later" in job.log

    shutil.copytree(tmp_path / "served", tmp_path / "early")
    (run,) = runs(tmp_path / "early")
    losses = metrics(run)["train/loss"]
    assert losses.items() <= logged(job)["train/loss"].items()
    assert sorted(losses) == list(range(5, max(losses) + 1, 5)) and 40 <= max(losses) < 600
    assert run.active

    with server(tmp_path / "served", port):
        sync = [sys.executable, "-m", "demo", "sync", str(job.run_dir)]
        env = {**clean_environment(full_project), **where}
        subprocess.run(sync, cwd=full_project, env=env, check=True)
    (run,) = runs(tmp_path / "served")
    assert metrics(run) == logged(job)
    assert (run["status"], run.active) == ("finished", False)
