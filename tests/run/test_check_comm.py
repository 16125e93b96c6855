"""The command check-comm: its results, and its errors if ranks are lost, hang or are wrong."""

import json
import os
import re
import signal
import socket
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
    "all-gather": lambda n: (n - 1) / n,
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


def error_of(job: Job, rank: int) -> str:
    """Return the only error of a rank."""
    (line,) = [line for line in job.logs[rank].read_text().splitlines() if "error: " in line]
    return line


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
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    assert (found["backend"], found["devices"]) == ("gloo", [f"{cores} CPU cores"] * ranks)
    assert found["hosts"] == [socket.gethostname()] * ranks
    rows = [(row["operation"], row["bytes"]) for row in found["speed"]]
    small, large = (size // 4 // ranks * ranks * 4 for size in (1024, 16384))
    assert rows == [("all-reduce", small), ("all-reduce", large), ("all-gather", large)]
    for row in found["speed"]:
        factor = FACTORS[row["operation"]](ranks)
        expected = row["bytes"] / row["microseconds"] / 1e3 * factor
        assert row["bus_gb_s"] == pytest.approx(expected)
    assert f"{ranks} ranks on gloo: all results are right" in job.logs[0].read_text()
    assert [line for log in job.logs[1:] for line in log.read_text().splitlines()] == []


@pytest.mark.parametrize(
    ("name", "doing"),
    [("dist.all_reduce", "all-reduce"), ("operations.all_gather", "all-gather")],
)
def test_a_wrong_result_on_one_rank_fails_them_all(
    full_project: Path, tmp_path: Path, name: str, doing: str
) -> None:
    change = (
        f"true = {name}\n"
        "def wrong(output, *args, **kwargs):\n"
        "    work = true(output, *args, **kwargs)\n"
        "    output[-1] += int(RANK == 1)\n"
        "    return work\n"
        f"{name} = wrong\n"
    )
    job = check_comm(full_project, tmp_path, 2, "--max-bytes=1024", change=change).wait()
    assert job.codes == [1, 1], job.log
    line = error_of(job, 1)
    assert line.startswith(f"error: {doing} failed on rank 1 on ")
    assert ": wrong result, 1024 bytes: " in line


def test_wrong_data_between_a_pair_is_named(full_project: Path, tmp_path: Path) -> None:
    change = (
        "true = operations.exchange\n"
        "def wrong(sent, received, *args):\n"
        "    true(sent, received, *args)\n"
        "    received[-1] += int(RANK == 1)\n"
        "operations.exchange = wrong\n"
    )
    flags = ("--timeout=5", "--pairs", "--max-bytes=1024")
    job = check_comm(full_project, tmp_path, 2, *flags, change=change).wait()
    assert job.codes == [1, 1], job.log
    assert re.match("error: exchange of ranks 0 and 1 .* rank 1 .*wrong data", error_of(job, 1))


def test_check_comm_needs_two_ranks(full_project: Path, tmp_path: Path) -> None:
    job = check_comm(full_project, tmp_path, 1).wait()
    assert job.codes == [1]
    assert re.fullmatch("error: .* two ranks .*\n", job.log)


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
    assert ("--pairs" if flag == "--help" else "--timeout") in done.stdout + done.stderr


def test_a_timeout_out_of_range_is_named(full_project: Path, tmp_path: Path) -> None:
    job = check_comm(full_project, tmp_path, 2, "--timeout=0").wait()
    assert job.codes == [1, 1]
    for log in job.logs:
        (line,) = log.read_text().splitlines()
        assert line.startswith("error: timeout is 0: it must be ")


@pytest.mark.parametrize(("ranks", "victim"), [pytest.param(2, 0, marks=pytest.mark.slow), (3, 1)])
@pytest.mark.parametrize("how", ["SIGSTOP", "SIGKILL"])
def test_ranks_without_an_answer_end_with_one_line(
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
    job = check_comm(full_project, tmp_path, ranks, "--timeout=5", change=change)
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
        line = error_of(job, rank)
        assert re.match(f"error: (all-gather .*)?rank {rank} on node{rank}\\b", line)
        assert "last log lines" in line
    assert job.processes[victim].returncode == -signal.SIGKILL
    if victim:  # rank 0 has shown what was measured before
        assert job.logs[0].read_text().count("\nall-reduce  ") == 2


def test_an_error_of_torch_is_one_line(full_project: Path, tmp_path: Path) -> None:
    change = (
        "def refused(*args, **kwargs):\n"
        "    raise RuntimeError('no route to host')\n"
        "operations.all_gather = refused\n"
    )
    job = check_comm(full_project, tmp_path, 2, change=change).wait()
    assert job.codes == [1, 1]
    for rank in (0, 1):
        assert re.match(f"error: all-gather .* rank {rank} .*route to host", error_of(job, rank))


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


def test_one_node_compares_its_ranks_and_messages_of_megabytes_arrive(
    full_project: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    flags = ("--pairs", "--max-bytes=5000000", f"--json={path}")
    found = report_of(check_comm(full_project, tmp_path, 2, *flags), path)
    assert found["speed"][-1]["bytes"] == 2**22
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
    from demo.tools.check_comm.operations import mark_slow

    pairs = [{"gb_s": speed} for speed in speeds]
    mark_slow(pairs)
    assert [pair["slow"] for pair in pairs] == slow
