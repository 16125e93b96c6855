"""A run folder has one owner while that lives. After its death, the next owner takes over."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from .conftest import PATIENCE, clean_environment, python, srun

JOB = {"SLURM_JOB_ID": "77", "SLURM_CLUSTER_NAME": "c"}
OLD = 400  # seconds of silence
NO_PROCESS = 2**22 + 1  # above the largest number of a process


@pytest.fixture
def run_lock(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, in job 77."""
    from demo.engine.run import run_lock

    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run_lock, "HEARTBEAT", 0.02)
    return run_lock


def write_attempt(run_lock: ModuleType, run: Path, silent: float = 0, **other: object) -> Path:
    """Write the first attempt of a run, by this process, with some values changed."""
    path = run / "attempts" / "1.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**vars(run_lock.Attempt.mine()), **other}))
    os.utime(path, (time.time(), time.time() - silent))
    return path


def is_taken(run_lock: ModuleType, run: Path) -> bool:
    """Return whether this process gets the folder."""
    from demo.engine.errors import UsageError

    lock = run_lock.RunLock(run)
    try:
        lock.acquire()
    except UsageError as error:
        assert str(run) in str(error) and "\n" not in str(error)
        assert f"dead, remove {run}/attempts/1.json" in str(error)
        return False
    assert lock.path == run / "attempts" / "2.json"
    lock.release()
    return True


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        ({}, False),
        ({"ended": True}, True),
        ({"pid": NO_PROCESS}, True),
        ({"pid": NO_PROCESS, "job": None}, True),
        ({"started": 5.0}, True),  # the number is another process's now
        ({"system": "another container", "pid": NO_PROCESS}, False),
        ({"host": "n2"}, False),
        ({"host": "n2", "silent": OLD}, True),
        ({"host": "n2", "job": None, "cluster": None}, False),
        ({"host": "n2", "job": None, "cluster": None, "silent": OLD}, True),
        ({"host": 5}, False),  # damaged: only its age tells
        ({"host": 5, "silent": OLD}, True),
    ],
)
def test_an_attempt_is_judged_by_its_process_and_its_silence(
    run_lock: ModuleType, tmp_path: Path, other: dict[str, Any], taken: bool
) -> None:
    write_attempt(run_lock, tmp_path / "run", **other)
    assert is_taken(run_lock, tmp_path / "run") == taken


def test_a_process_that_nobody_waited_for_is_dead(run_lock: ModuleType, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        process = psutil.Process(ended.pid)
        while process.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        started = process.create_time() - psutil.boot_time()
        write_attempt(run_lock, tmp_path / "run", pid=ended.pid, started=started)
        assert is_taken(run_lock, tmp_path / "run")


@pytest.mark.parametrize(
    ("restart", "start", "taken"), [("1", "0", True), ("0", "1", True), ("0", "0", False)]
)
def test_a_job_follows_its_earlier_start_on_another_node(
    run_lock: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    restart: str,
    start: str,
    taken: bool,
) -> None:
    """Slurm has requeued it, or its batch script has started the ranks again."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", restart)
    monkeypatch.setenv("RESTART_IN_JOB", start)
    write_attempt(run_lock, tmp_path / "run", host="n2", restart=0, start=0)
    assert is_taken(run_lock, tmp_path / "run") == taken
    # What was left behind of an earlier start takes nothing from a later one.
    write_attempt(run_lock, tmp_path / "later", OLD, host="n2", restart=2, start=0)
    assert not is_taken(run_lock, tmp_path / "later")


@pytest.mark.parametrize(("silent", "taken"), [(0, False), (OLD, True)])
def test_another_job_is_judged_by_its_silence(
    run_lock: ModuleType, tmp_path: Path, silent: float, taken: bool
) -> None:
    write_attempt(run_lock, tmp_path / "run", silent, host="n2", job="76")
    assert is_taken(run_lock, tmp_path / "run") == taken
    # A job of another cluster may have the same number as this one, and fewer restarts.
    write_attempt(run_lock, tmp_path / "there", silent, host="n2", cluster="d", restart=-1)
    assert is_taken(run_lock, tmp_path / "there") == taken


def test_what_a_refused_starter_is_told(run_lock: ModuleType, tmp_path: Path) -> None:
    from demo.engine.errors import UsageError

    write_attempt(run_lock, tmp_path / "run", 60, host="n2", pid=12)
    said = r"/run is .* process 12 on n2, job 77, .* 60 s ago: .*\(scancel 77\).* --run-dir; "
    with pytest.raises(UsageError, match=said):
        run_lock.RunLock(tmp_path / "run").acquire()


def test_an_owner_gives_signs_of_life_and_a_folder_without_a_run_goes(
    run_lock: ModuleType, tmp_path: Path
) -> None:
    lock = run_lock.RunLock(tmp_path / "run")
    lock.acquire()
    assert run_lock.owner_of(tmp_path / "run") == lock.mine
    os.utime(lock.path, (0, 0))
    while lock.path.stat().st_mtime == 0:
        time.sleep(0.01)
    lock.release()
    assert not (tmp_path / "run").exists(), "nothing was written"
    assert run_lock.owner_of(tmp_path / "run") is None

    lock = run_lock.RunLock(tmp_path / "run")
    lock.acquire()
    (tmp_path / "run" / "config.yaml").touch()
    lock.release()
    assert run_lock.owner_of(tmp_path / "run") is None
    assert is_taken(run_lock, tmp_path / "run")
    found = sorted(str(path.relative_to(tmp_path / "run")) for path in tmp_path.glob("run/**/*.*"))
    assert found == ["attempts/1.json", "attempts/2.json", "config.yaml"]


def test_one_that_was_given_up_for_dead_ends(project: Path, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys, time; from demo.engine.run import run_lock\n"
        "run_lock.HEARTBEAT = 0.02\n"
        "lock = run_lock.RunLock(pathlib.Path(sys.argv[1])); lock.acquire()\n"
        "lock.path.with_name('2.json').touch()\n"
        "time.sleep(300)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env=clean_environment(project),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "another one has" in done.stderr and "2.json" in done.stderr


# Some processes that want the same folders at the same time: new ones, and those of dead attempts.
RACE = """
import json, multiprocessing, pathlib, sys
from demo.engine.run import run_lock
from demo.engine.errors import UsageError

root, starters, rounds = pathlib.Path(sys.argv[1]), 6, 100
dead = json.dumps({**vars(run_lock.Attempt.mine()), "started": 5.0})
for number in range(1, rounds, 2):
    (root / f"{number}" / "attempts").mkdir(parents=True)
    (root / f"{number}" / "attempts" / "1.json").write_text(dead)

def start(barrier, owners):
    for number in range(rounds):
        lock = run_lock.RunLock(root / f"{number}")
        barrier.wait()
        try:
            lock.acquire()
        except UsageError as error:
            assert "is the run folder of process" in str(error), error
        else:
            owners.put(number)
        barrier.wait()
        lock.release()

fork = multiprocessing.get_context("fork")
barrier, owners = fork.Barrier(starters, timeout=60), fork.SimpleQueue()
processes = [fork.Process(target=start, args=(barrier, owners)) for _ in range(starters)]
for each in processes:
    each.start()
for each in processes:
    each.join()
assert not any(each.exitcode for each in processes)
found = []
while not owners.empty():
    found.append(owners.get())
assert sorted(found) == list(range(rounds)), sorted(found)
assert not list(root.glob("*/*/3.json"))
"""


def test_of_many_that_start_at_once_one_gets_the_folder(project: Path, tmp_path: Path) -> None:
    python(project, RACE, tmp_path)


def test_of_two_trainings_that_start_at_once_one_trains(project: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = (f"--run-dir={run}", "--max-steps=100000", "--epochs=1000", "--checkpoint-every=20")
    jobs = [srun(project, tmp_path / name, 1, *flags) for name in ("first", "second")]
    deadline = time.monotonic() + PATIENCE
    try:
        while all(job.processes[0].poll() is None for job in jobs):
            assert time.monotonic() < deadline, "none was refused"
            time.sleep(0.05)
        owner, refused = sorted(jobs, key=lambda job: job.processes[0].poll() is not None)
        owner.run_dir = run
        owner.wait_for_step(50)
        assert refused.wait().codes == [1]
        pid = owner.processes[0].pid
        assert f"process {pid} on " in refused.log
        assert "Traceback" not in refused.log
    finally:
        for job in jobs:
            job.kill()
    # As if it lived on another machine: nothing of the run is touched.
    (attempt,) = (run / "attempts").glob("?.json")
    state = json.loads(attempt.read_text())
    attempt.write_text(json.dumps(state | {"host": "elsewhere"}))
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert srun(project, tmp_path / "third", 1, *flags).wait().codes == [1]
    after = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    before.pop(run / "attempts"), after.pop(run / "attempts")  # where the time is taken
    assert before == after
