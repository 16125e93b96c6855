"""What only Aim has: its watcher, its server, and names that it does not document."""

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import metrics
import pytest

from ..conftest import PACED, PATIENCE, command, free_port, python, srun
from . import TRACKERS, check_numbers
from .conftest import Past

if "aim" not in TRACKERS:
    pytest.skip("Aim has no builds for this Python", allow_module_level=True)

import aim

from .aim import COMMAND, opened, runs

SHORT = ("--max-steps=200", "--checkpoint-every=20", "--log-every=5", "--trackers=aim")


@pytest.mark.slow
def test_the_watcher_of_aim_knows_how_a_run_ended(resumed: Past, failed: tuple[Path, Past]) -> None:
    """It tells of a run whose next sign of life is overdue."""
    (run,) = opened(resumed.run_dir.parent)
    assert not run.active and "correct-horse" not in str(run[...])
    assert any(each.startswith("torch==") for each in run["provenance", "packages"])
    (told,) = (resumed.run_dir.parent / ".aim/check_ins").glob(f"{run.hash}-*-finished-*")
    assert told.name.endswith("-00000")

    job = failed[1]
    (run,) = opened(job.run_dir.parent)
    assert not run.active
    (last,) = (job.run_dir.parent / ".aim/check_ins").glob(f"{run.hash}-*-check_in-*")
    assert last.name.endswith("-00001")
    assert not list((job.run_dir.parent / ".aim/check_ins").glob(f"{run.hash}-*-finished-*"))
    error = json.loads((job.run_dir / "status.json").read_text())["error"]
    warning, told = (each.message for each in run.get_log_records().data.values_list()[0])
    assert told == error and "goes on" in warning


@contextmanager
def server(repository: Path, port: str) -> Iterator[subprocess.Popen]:
    """Serve a repository, with all that belongs to the server in a process group."""
    command = [COMMAND, "server", "--repo", repository, "--host", "127.0.0.1", "--port", port, "-y"]
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


def test_the_names_that_aim_does_not_document_are_there(tmp_path: Path) -> None:
    """Those that trackers/aim.py and tools/monitor/aim.py use; the tests below use what they do."""
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


RESUMER = """
import aim, os, pathlib, sys
from demo.trackers import Run
from demo.trackers.aim import Tracker
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


def test_a_new_run_waits_for_no_dead_process_and_a_resumed_one_for_none(
    full_project: Path, tmp_path: Path
) -> None:
    python(full_project, RESUMER, tmp_path)
    gone, run = opened(tmp_path)
    assert (gone.name, run.name, run.experiment) == ("gone", "run", "trial")
    about = {each["name"]: each["values"] for each in run.collect_sequence_info("metric")["metric"]}
    assert about.keys() == {"early", "loss"}
    shown = [about["loss"][key] for key in ("first_step", "last_step", "last", "min", "max")]
    assert shown == [3, 30, 30, -18, 30]


def test_a_server_that_is_not_there_does_not_stop_training(
    full_project: Path, tmp_path: Path
) -> None:
    address = f"aim://me:battery@127.0.0.1:{free_port()}"
    flags = (*SHORT, f"--run-root={tmp_path}", "--experiment=trial")
    job = srun(full_project, tmp_path / "trial/run", 1, *flags, AIM_REPO=address).wait()
    assert job.codes == [0], job.log
    assert list(metrics.series(job.run_dir)["train/loss"]) == list(range(5, 201, 5))
    assert "aim could not" in job.log
    assert "'python -m demo sync" in job.log and "Traceback" not in job.log
    assert "battery" not in job.log
    assert not (tmp_path / "trial/.aim").exists()


@pytest.mark.slow
def test_a_server_gets_everything_also_after_it_died(full_project: Path, tmp_path: Path) -> None:
    port = free_port()
    where = {"AIM_REPO": f"aim://127.0.0.1:{port}"}
    flags = (*SHORT, f"--run-root={tmp_path}", "--experiment=trial")
    flags = (*flags, "--max-steps=600", "--epochs=3")
    (tmp_path / "served").mkdir()
    with server(tmp_path / "served", port) as process:
        stopped = srun(full_project, tmp_path / "trial/run", 1, *flags, **where, **PACED)
        stopped.interrupt(30, "aim")
        job = srun(full_project, tmp_path / "trial/run", 1, *flags, **where, STEP_SECONDS="0.03")
        job.wait_for_step(100)
        stop(process)
    assert job.wait().summary["resumed_from_step"]
    logged = metrics.series(job.run_dir)
    assert list(logged["train/loss"]) == list(range(5, 601, 5))
    assert f"sync {job.run_dir}'" in job.log

    shutil.copytree(tmp_path / "served", tmp_path / "early")
    (shown,) = runs(tmp_path / "early")
    losses = shown.numbers["train/loss"]
    assert losses.items() <= logged["train/loss"].items()
    assert sorted(losses) == list(range(5, max(losses) + 1, 5)) and 40 <= max(losses) < 600
    assert shown.status == "running"

    with server(tmp_path / "served", port):
        assert command(full_project, "sync", str(job.run_dir), **where).returncode == 0
    (shown,) = runs(tmp_path / "served")
    check_numbers(shown, job.run_dir)
    assert shown.status == "finished"
