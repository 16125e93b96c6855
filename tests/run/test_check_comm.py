"""The command check-comm: its results, and its errors when ranks are lost, hang or lie."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import PATIENCE, Job, clean_environment, spawn, tasks

# Of nccl-tests: bus bandwidth over algorithm bandwidth, for n ranks.
FACTORS = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "broadcast": lambda n: 1,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
}
# Runs the command after a change to what it uses; RANK is this rank's number.
TAMPERED = """
import os, signal, socket, time
import torch.distributed as dist
from demo import __main__
from demo.tools.check_comm import examine, operations
RANK = int(os.environ["SLURM_PROCID"])
{change}
__main__.main()
"""


def check_comm(project: Path, folder: Path, ranks: int, *flags: str, change: str = "") -> Job:
    """Start check-comm on some ranks of this machine, small messages first."""
    (folder / "tampered.py").write_text(TAMPERED.format(change=change))
    envs = tasks(ranks, PYTHONPATH=f"{folder}{os.pathsep}{project / 'src'}")
    module = "tampered" if change else "demo"
    command = [module, "check-comm", "--device=cpu", "--max-bytes=20000", *flags]
    return spawn(project, folder / "check", [command] * ranks, envs)


def report_of(job: Job, path: Path) -> dict[str, Any]:
    """Return the results of ranks that all ended well."""
    assert set(job.wait().codes) == {0}, job.log
    return json.loads(path.read_text())


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_understand_each_other_pass(
    full_project: Path, tmp_path: Path, ranks: int
) -> None:
    path = tmp_path / "report.json"
    job = check_comm(full_project, tmp_path, ranks, f"--json={path}")
    found = report_of(job, path)
    assert (found["backend"], found["faults"], found["verdict"]) == ("gloo", 0, "all is right")
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    assert [(place["rank"], place["facts"]) for place in found["ranks"]] == [
        (rank, f"{cores} CPU cores") for rank in range(ranks)
    ]
    rows = [(row["operation"], row["bytes"]) for row in found["speed"]]
    sizes = [size // 4 // ranks * ranks * 4 for size in (1024, 16384)]
    assert rows == [(name, size) for name in FACTORS for size in sizes]
    for row in found["speed"]:
        assert row["algorithm_gb_s"] == pytest.approx(row["bytes"] / row["microseconds"] / 1e3)
        factor = FACTORS[row["operation"]](ranks)
        assert row["bus_gb_s"] == pytest.approx(row["algorithm_gb_s"] * factor)
    assert f"{ranks} ranks on gloo: all is right" in job.logs[0].read_text()
    assert [line for log in job.logs[1:] for line in log.read_text().splitlines()] == []


def test_messages_of_megabytes_arrive(full_project: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    job = check_comm(full_project, tmp_path, 2, "--max-bytes=5000000", f"--json={path}")
    assert report_of(job, path)["speed"][-1]["bytes"] == 2**22


def test_a_wrong_result_on_one_rank_fails_them_all(full_project: Path, tmp_path: Path) -> None:
    change = (
        "true = operations.prepare\n"
        "def lying(*args):\n"
        "    run, output, expected, bus = true(*args)\n"
        "    def lie():\n"
        "        run()\n"
        "        output[-1] += int(RANK == 1)\n"
        "    return lie, output, expected, bus\n"
        "operations.prepare = lying\n"
    )
    path = tmp_path / "report.json"
    flags = ("--max-bytes=1024", f"--json={path}")
    job = check_comm(full_project, tmp_path, 2, *flags, change=change).wait()
    assert job.codes == [1, 1], job.log
    for name in FACTORS:
        assert f"[rank 1] wrong result of {name}, 1024 bytes: 1 elements differ" in job.log
    assert "2 ranks on gloo: FAILED: 4 wrong results" in job.logs[0].read_text()
    found = json.loads(path.read_text())
    assert [row["wrong_ranks"] for row in found["speed"]] == [1] * 4 and found["faults"] == 4


def test_wrong_data_between_a_pair_is_named(full_project: Path, tmp_path: Path) -> None:
    change = (
        "true = operations.exchange\n"
        "def lying(sent, received, *args):\n"
        "    true(sent, received, *args)\n"
        "    received[-1] += int(RANK == 1)\n"
        "operations.exchange = lying\n"
    )
    flags = ("--timeout=5", "--pairs", "--max-bytes=1024")
    job = check_comm(full_project, tmp_path, 2, *flags, change=change).wait()
    assert job.codes == [1, 1], job.log
    (line,) = [line for line in job.logs[1].read_text().splitlines() if "error: " in line]
    assert line.startswith("error: comparing pairs failed on rank 1 on ")
    assert "all ranks are alive: wrong data from rank 0 on " in line


def test_check_comm_needs_two_ranks(full_project: Path, tmp_path: Path) -> None:
    job = check_comm(full_project, tmp_path, 1).wait()
    assert job.codes == [1]
    (line,) = job.log.splitlines()
    assert line.startswith("error: check-comm needs two ranks or more")


@pytest.mark.parametrize("flag", ["--help", "--timeout=soon"])
def test_flags_are_read_without_torch(full_project: Path, tmp_path: Path, flag: str) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = subprocess.run(
        [sys.executable, "-m", "demo", "check-comm", flag],
        cwd=full_project,
        env={
            **clean_environment(full_project),
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{full_project / 'src'}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == (0 if flag == "--help" else 2), done.stderr
    assert ("--min-gb-s" if flag == "--help" else "--timeout") in done.stdout + done.stderr


@pytest.mark.parametrize("flag", ["--timeout=0", "--max-bytes=0"])
def test_values_out_of_range_are_named(full_project: Path, tmp_path: Path, flag: str) -> None:
    job = check_comm(full_project, tmp_path, 2, flag).wait()
    assert job.codes == [1, 1]
    for log in job.logs:
        (line,) = log.read_text().splitlines()
        assert line.startswith(f"error: {flag[2:-2].replace('-', '_')} is 0: it should be ")


def test_ranks_slower_than_asked_for_fail(full_project: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    flags = ("--min-gb-s=1e6", f"--json={path}")
    job = check_comm(full_project, tmp_path, 2, *flags).wait()
    assert job.codes == [1, 1], job.log
    verdict = json.loads(path.read_text())["verdict"]
    assert verdict.startswith("all-reduce of 16384 bytes has a bus bandwidth of ")
    assert verdict.endswith(" GB/s, less than the 1e+06 asked for")
    assert f"FAILED: {verdict}" in job.logs[0].read_text()


@pytest.mark.parametrize(("ranks", "victim"), [pytest.param(2, 0, marks=pytest.mark.slow), (3, 1)])
@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_hangs_or_dies_is_named(
    full_project: Path, tmp_path: Path, ranks: int, victim: int, how: str
) -> None:
    change = (
        "true = operations.all_gather\n"
        "def fatal(*args, **kwargs):\n"
        f"    if RANK == {victim}:\n"
        f"        os.kill(os.getpid(), signal.{how})\n"
        "    return true(*args, **kwargs)\n"
        "operations.all_gather = fatal\n"
        "socket.gethostname = lambda: f'node{RANK}'\n"
    )
    path = tmp_path / "report.json"
    flags = ("--timeout=5", f"--json={path}")
    job = check_comm(full_project, tmp_path, ranks, *flags, change=change)
    alive = [rank for rank in range(ranks) if rank != victim]
    deadline = time.monotonic() + PATIENCE
    try:
        while any(job.processes[rank].poll() is None for rank in alive):
            assert time.monotonic() < deadline, job.log
            time.sleep(0.1)
    finally:
        job.kill()
    for rank in alive:
        assert job.processes[rank].returncode == 1, job.log
        log = job.logs[rank].read_text()
        (line,) = [line for line in log.splitlines() if line.startswith("error: ")]
        assert line.startswith(
            f"error: all-gather failed: no answer from rank {victim} on node{victim} "
            f"(reported by rank {rank} on node{rank}: "
        )
    assert job.processes[victim].returncode == -signal.SIGKILL
    if victim:  # rank 0 keeps what was measured before
        found = json.loads(path.read_text())
        assert found["verdict"] == "not finished"
        names = [row["operation"] for row in found["speed"]]
        assert names == ["all-reduce"] * 2 + ["broadcast"] * 2
        assert "\nbroadcast  " in job.logs[0].read_text()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_results_so_far_are_kept_at_a_signal(
    full_project: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    marks = [tmp_path / f"rank {rank} hangs" for rank in range(2)]
    change = (
        "def hang(*args, **kwargs):\n"
        f"    open(f'{tmp_path}/rank {{RANK}} hangs', 'w').close()\n"
        "    time.sleep(1000)\n"
        "operations.all_gather = hang\n"
    )
    path = tmp_path / "report.json"
    job = check_comm(full_project, tmp_path, 2, f"--json={path}", change=change)
    deadline = time.monotonic() + PATIENCE
    while not all(mark.exists() for mark in marks):
        assert time.monotonic() < deadline, job.log
        time.sleep(0.1)
    for process in job.processes:
        process.send_signal(sent)
    assert job.wait().codes == [130, 130], job.log
    found = json.loads(path.read_text())
    assert found["verdict"] == "not finished" and len(found["speed"]) == 4
    assert "2 ranks on gloo: FAILED: not finished" in job.logs[0].read_text()


def test_an_error_of_all_ranks_blames_none(full_project: Path, tmp_path: Path) -> None:
    change = (
        "def refused(*args, **kwargs):\n"
        "    raise RuntimeError('no route to host')\n"
        "operations.all_gather = refused\n"
    )
    job = check_comm(full_project, tmp_path, 2, change=change).wait()
    assert job.codes == [1, 1]
    for rank, log in enumerate(job.logs):
        (line,) = [line for line in log.read_text().splitlines() if "error: " in line]
        assert line.startswith(f"error: all-gather failed on rank {rank} on ")
        assert "but all ranks are alive: no route to host (" in line


def test_a_slow_pair_of_nodes_stands_out(full_project: Path, tmp_path: Path) -> None:
    # The first node has two ranks.
    change = (
        "socket.gethostname = lambda: f'node{max(RANK - 1, 0)}'\n"
        "operations.SMALL = 0\n"
        "true = operations.exchange\n"
        "def slow(sent, received, peer, group):\n"
        "    if {peer, RANK} == {2, 3}:\n"
        "        time.sleep(0.3)\n"
        "    return true(sent, received, peer, group)\n"
        "operations.exchange = slow\n"
    )
    path = tmp_path / "report.json"
    job = check_comm(full_project, tmp_path, 4, "--pairs", f"--json={path}", change=change)
    pairs = report_of(job, path)["pairs"]
    assert [pair["ranks"] for pair in pairs] == [[0, 2], [0, 3], [2, 3]]
    assert pairs[2]["hosts"] == ["node1", "node2"]
    assert pairs[2]["slow"]
    assert pairs[2]["gb_s"] == pytest.approx(16384 / 0.3 / 1e9, rel=0.5)
    lines = job.logs[0].read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("2 - 3")]
    assert line.endswith("node1 - node2  SLOW")


def test_one_node_compares_its_ranks(full_project: Path, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    found = report_of(check_comm(full_project, tmp_path, 2, "--pairs", f"--json={path}"), path)
    (pair,) = found["pairs"]
    assert (pair["ranks"], pair["slow"]) == ([0, 1], False)


@pytest.mark.parametrize(
    ("speeds", "slow"),
    [
        ([9], [False]),
        ([9, 10, 4], [False, False, True]),
        ([1, 10, 1], [True, False, True]),
        ([9, 10, 8, 10, 10, 5.1], [False] * 6),
        ([1, 1, 1, 10, 10, 10], [True] * 3 + [False] * 3),
    ],
)
def test_slow_is_less_than_half(project: Path, speeds: list[float], slow: list[bool]) -> None:
    from demo.tools.check_comm import mark_slow

    pairs = [{"gb_s": speed} for speed in speeds]
    mark_slow(pairs)
    assert [pair["slow"] for pair in pairs] == slow


def test_two_ranks_on_one_gpu_are_named(full_project: Path, tmp_path: Path) -> None:
    change = (
        "true = examine.describe\n"
        "examine.describe = lambda *args: {**true(*args), 'gpu': 'GPU-abc'}\n"
        "examine.choose_backend = lambda *args: 'nccl'\n"
    )
    job = check_comm(full_project, tmp_path, 2, change=change).wait()
    assert job.codes == [1, 1]
    for log in job.logs:
        (line,) = log.read_text().splitlines()
        assert line.startswith("error: ranks 0 and 1 on ")
        assert "have the same GPU (GPU-abc)" in line
