"""A file system that shows other nodes' changes late, and one where locks fail."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import optuna
import pytest
from metrics import reproducible
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from .conftest import PATIENCE, QUICK, Job, Launch, spawn, tasks
from .trackers import TRACKERS

DISK = Path(__file__).with_name("shared_disk.py")
LATE = 3  # seconds
RUN = "runs/demo/shared"
LONG = ("--max-steps=60", "--log-every=1", "--checkpoint-every=10")
MakeNodes = Callable[[Path, str], list[Path]]


@pytest.fixture
def make_nodes(tmp_path: Path) -> Iterator[MakeNodes]:
    """Return what copies a project to a disk, and returns where each of two nodes sees it."""
    started: list[tuple[Path, subprocess.Popen]] = []

    def make(project: Path, locks: str) -> list[Path]:
        disk = tmp_path / "disk"
        shutil.copytree(project, disk / "demo")
        for number in (1, 2):
            mount = tmp_path / f"node{number}"
            mount.mkdir()
            command = [sys.executable, DISK, disk, mount, locks, str(LATE)]
            started.append((mount, subprocess.Popen(command)))
            deadline = time.monotonic() + PATIENCE
            while not os.path.ismount(mount):
                assert started[-1][1].poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
        return [mount / "demo" for mount, _ in started]

    if not shutil.which("fusermount3"):
        pytest.skip("there is no FUSE: run scripts/install-fuse.sh")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("this user may not mount by FUSE: /dev/fuse can't be opened")
    yield make
    for mount, process in started:
        subprocess.run(["fusermount3", "-u", "-z", mount], check=True)
        process.kill()
        process.wait()


def start(nodes: list[Path], *flags: str, **env: str) -> Job:
    """Start a rank on each node, in its project."""
    command = ["demo", "train", f"--run-dir={RUN}", *QUICK, *flags]
    logs = nodes[0].parents[1] / f"log{time.monotonic_ns()}"
    ranks = [
        spawn(node, logs / f"rank{rank}", [command], [task])
        for rank, (node, task) in enumerate(zip(nodes, tasks(len(nodes), **env), strict=True))
    ]
    return Job(
        [process for rank in ranks for process in rank.processes],
        [log for rank in ranks for log in rank.logs],
        nodes[0].parents[1] / "disk/demo" / RUN,
    )


def stop_after(job: Job, step: int) -> None:
    """Kill the ranks once they have logged a step, and written a checkpoint."""
    job.wait_for_step(step)
    while not (job.run_dir / "checkpoints/latest").exists():
        assert job.processes[0].poll() is None, job.log
        time.sleep(0.02)
    job.kill()


def test_nodes_create_one_file(project: Path, make_nodes: MakeNodes) -> None:
    """A node that still knows of no such file opens that of the other, but can't create it."""
    first, second = make_nodes(project, "own")
    for name in ("journal", "lock"):
        assert not (second / name).exists()
        (first / name).write_text("one\n")
        assert not (second / name).exists()
    with (second / "journal").open("a") as file:
        file.write("two\n")
    assert (first / "journal").read_text() == "one\ntwo\n"
    with pytest.raises(FileExistsError):
        (second / "lock").open("x")


def test_a_node_knows_the_length_of_what_it_has_not_sent(
    project: Path, make_nodes: MakeNodes
) -> None:
    """So the second line does not replace the first one."""
    first, second = make_nodes(project, "none")
    with (first / "lines").open("a", buffering=1) as file:
        file.write("one\n")
        time.sleep(LATE + 0.5)
        assert (first / "lines").stat().st_size == 4
        file.write("two\n")
    assert (second / "lines").read_text() == "one\ntwo\n"


@pytest.mark.parametrize(
    ("strategy", "locks"),
    [("ddp", "own"), ("fsdp", "own"), pytest.param("ddp", "none", marks=pytest.mark.slow)],
)
def test_ranks_go_on_from_what_another_node_wrote(
    project: Path, make_nodes: MakeNodes, launch: Launch, strategy: str, locks: str
) -> None:
    """Killed, and started again with the first rank on the other node: it ends the same."""
    flags = (*LONG, f"--strategy={strategy}")
    whole = launch(2, *flags)
    nodes = make_nodes(project, locks)
    for order, step in ((nodes, 15), (nodes[::-1], 35)):
        job = start(order, *flags, STEP_SECONDS="0.05")
        stop_after(job, step)
    job = start(nodes, *flags)
    assert job.wait().summary["resumed_from_step"] >= 30
    assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert reproducible(job.metrics()) == reproducible(whole.metrics())


def test_another_node_does_not_take_a_run_folder(project: Path, make_nodes: MakeNodes) -> None:
    """It takes it once the training there is over, though it looked before there was a folder."""
    nodes = make_nodes(project, "own")
    first = start(nodes[:1], "--max-steps=1000", "--checkpoint-every=5", STEP_SECONDS="0.05")
    assert not (nodes[1] / RUN).exists()  # that is what this node knows for some seconds
    first.wait_for_step(3)
    second = start(nodes[1:], *LONG).wait()
    assert second.codes == [1], second.log
    assert f"process {first.processes[0].pid} on" in second.log
    stop_after(first, 5)
    assert start(nodes[1:], *LONG).wait().summary["resumed_from_step"] >= 5


def test_where_locks_fail_the_trackers_that_need_them_are_off(
    full_project: Path, make_nodes: MakeNodes
) -> None:
    """A training continues without them."""
    (node, _) = make_nodes(full_project, "none")
    job = start([node], "--max-steps=10", "--trackers", *TRACKERS).wait()
    assert job.summary["world_size"] == 1
    off = {name for name in TRACKERS if f"tracker {name} could not start" in job.log}
    assert off == {"aim", "mlflow"} & {*TRACKERS}
    assert "database is locked" in job.log  # the reason, and not what followed from it


def test_two_nodes_search_one_study_where_locks_fail(
    full_project: Path, make_nodes: MakeNodes
) -> None:
    """Each trial is of one of them, and there are no more than were asked for."""
    nodes = make_nodes(full_project, "none")
    flags = "--dataset=synthetic --validation-size=500 --device=cpu --trackers=none --max-steps=5"
    train = f'exec {sys.executable} -m demo train {flags} "$@"'
    command = ["demo", "sweep", "--trials=4", "--pruner=none", "--", "bash", "-c", train, "trial"]
    workers = [
        spawn(node, node.parents[1] / f"{node.parent.name}.sweep", [command], [{}])
        for node in nodes
    ]
    for worker in workers:
        assert worker.wait().codes == [0], worker.log
        assert "trial-000" in worker.log
    disk = nodes[0].parents[1] / "disk/demo/runs/sweep"
    storage = JournalStorage(JournalFileBackend(str(disk / "journal.log")))
    trials = optuna.load_study(study_name="sweep", storage=storage).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 4
    assert len(list(disk.glob("trial-*/summary.json"))) == 4
