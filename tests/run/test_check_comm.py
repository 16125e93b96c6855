"""The command check-comm: what it finds, and what it does when ranks are lost, hang or lie."""

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
    "all-to-all": lambda n: (n - 1) / n,
    "send/recv ring": lambda n: 1,
}
# Runs the command after a change to what it stands on; RANK is this rank's number.
TAMPERED = """
import dataclasses, os, signal, socket, time
import torch.distributed as dist
from demo import __main__
from demo.tools.check_comm import examine, operations, timing
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
        "def lie(run):\n"
        "    def lying(*args):\n"
        "        arrived = run(*args)\n"
        "        arrived[-1] += int(RANK == 1)\n"
        "        return arrived\n"
        "    return lying\n"
        "for name, true in operations.OPERATIONS.items():\n"
        "    operations.OPERATIONS[name] = dataclasses.replace(true, run=lie(true.run))\n"
    )
    job = check_comm(full_project, tmp_path, 2, "--max-bytes=1024", change=change).wait()
    assert job.codes == [1, 1], job.log
    for name in FACTORS:
        for dtype in ("float32", "float16", "bfloat16", "int64"):
            assert f"wrong result of {name}, 1024 bytes of torch.{dtype}: element " in job.log
    assert "2 ranks on gloo: FAILED: 24 wrong results" in job.logs[0].read_text()


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
        "true = dist.all_to_all_single\n"
        "def fatal(*args, **kwargs):\n"
        f"    if RANK == {victim}:\n"
        f"        os.kill(os.getpid(), signal.{how})\n"
        "    return true(*args, **kwargs)\n"
        "dist.all_to_all_single = fatal\n"
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
        log = job.logs[rank].read_text()
        (line,) = [line for line in log.splitlines() if line.startswith("error: ")]
        assert line.startswith(
            f"error: all-to-all failed: no answer from rank {victim} on node{victim} "
            f"(says rank {rank} on node{rank}: "
        )
    assert job.processes[victim].returncode == -signal.SIGKILL


def test_an_error_of_all_ranks_blames_none(full_project: Path, tmp_path: Path) -> None:
    change = (
        "def refused(*args, **kwargs):\n"
        "    raise RuntimeError('no route to host')\n"
        "dist.all_to_all_single = refused\n"
    )
    job = check_comm(full_project, tmp_path, 2, change=change).wait()
    assert job.codes == [1, 1]
    for rank, log in enumerate(job.logs):
        (line,) = log.read_text().splitlines()
        assert line.startswith(f"error: all-to-all failed at rank {rank} on ")
        assert "though all ranks are alive: no route to host (" in line


def test_a_slow_pair_of_nodes_stands_out(full_project: Path, tmp_path: Path) -> None:
    # The first node has two ranks.
    change = (
        "socket.gethostname = lambda: f'node{max(RANK - 1, 0)}'\n"
        "timing.SMALL = 0\n"
        "true = timing.exchange\n"
        "def slow(sent, arrived, to, source, channel):\n"
        "    if to == source and {to, RANK} == {2, 3}:\n"
        "        time.sleep(0.3)\n"
        "    return true(sent, arrived, to, source, channel)\n"
        "timing.exchange = slow\n"
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


@pytest.mark.parametrize("count", range(2, 9))
def test_each_pair_has_one_turn_and_nobody_two_at_once(project: Path, count: int) -> None:
    from demo.tools.check_comm.timing import turns

    found = list(turns(range(count)))
    for turn in found:
        busy = [member for pair in turn for member in pair]
        assert len(busy) == len(set(busy))
    pairs = sorted(pair for turn in found for pair in turn)
    assert pairs == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert len(found) == count - 1 + count % 2


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
    from demo.tools.check_comm.timing import mark_slow

    assert [pair["slow"] for pair in mark_slow([{"gb_s": s} for s in speeds])] == slow


def test_two_ranks_on_one_gpu_are_named(full_project: Path, tmp_path: Path) -> None:
    change = (
        "true = examine.place\n"
        "examine.place = lambda *args: {**true(*args), 'gpu': 'GPU-abc'}\n"
        "examine.choose_backend = lambda *args: 'nccl'\n"
    )
    job = check_comm(full_project, tmp_path, 2, change=change).wait()
    assert job.codes == [1, 1]
    for log in job.logs:
        (line,) = log.read_text().splitlines()
        assert line.startswith("error: ranks 0 and 1 on ")
        assert "have the same GPU (GPU-abc)" in line
