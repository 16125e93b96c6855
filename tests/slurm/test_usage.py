"""The costs of runs agree with Slurm's accounts of their jobs, except for seconds."""

import csv
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from cgroups import limited, set_limit
from renderer import render_project, shrink

from . import accounts
from .cluster import Cluster, missing, wait_for
from .conftest import ANSWERS, set_up
from .jobs import Job, Project

FLAGS = ("--dataset=synthetic", "--device=cpu", "--log-every=1", "--checkpoint-every=20")
ENDLESS = (*FLAGS, "--epochs=100000")
# A rank on each of two nodes, with a GPU that is one to Slurm alone.
ON_GPUS = ("--nodes=2", "--ntasks-per-node=1", "--gres=gpu:a100:1", "slurm/train_multi_node.sbatch")
ON_CPUS = ("--ntasks-per-node=2", "slurm/train_cpu.sbatch")
# Seconds by which the end of an attempt and that of its job may differ: what was requeued or
# cancelled has ended for Slurm before its ranks have; otherwise the batch script ends after them.
END = 30


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three nodes, with accounts."""
    if reason := missing() or accounts.missing():
        pytest.skip(reason)
    with Cluster(nodes=3, hasty=True, accounts=True) as running:
        yield running


@pytest.fixture(scope="module")
def project(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project without trackers, which take long to start."""
    root = tmp_path_factory.mktemp("project") / "demo"
    shrink(render_project(root, **ANSWERS, trackers=[]))
    set_up(root)
    # What comes before the ranks is paid, too, such as modules that take long to load.
    (root / "slurm/site.sh").write_text("sleep 4\n")
    # A run of seconds, too, says what to ask for next time.
    lines = root / "src/demo/plugins/usage/lines.py"
    text = lines.read_text()
    assert "\nENOUGH = 600.0" in text
    lines.write_text(text.replace("\nENOUGH = 600.0", "\nENOUGH = 0.0"))
    return Project(cluster, root)


def paid(job: Job) -> list[dict[str, Any]]:
    """Return what Slurm says of each start of a job, once it knows all of its end."""
    form = "--format=JobIDRaw,Start,End,ElapsedRaw,AllocTRES,ConsumedEnergyRaw"
    command = ("sacct", "--duplicates", "--noheader", "--parsable2", f"--jobs={job.id}", form)
    rows: list[list[str]] = []

    def all_ended() -> bool:
        said = job.project.cluster.run(*command, SLURM_TIME_FORMAT="%s").stdout
        rows[:] = [line.split("|") for line in said.splitlines()]
        return all(end.isdecimal() for _, _, end, *_ in rows)

    wait_for(all_ended, lambda: f"{rows}", 0.5)
    starts = []
    for name, begin, end, elapsed, tres, joules in rows:
        if name == job.id:
            given = dict(each.split("=") for each in tres.split(","))
            numbers = {n: int(given.get(n, 0)) for n in ("cpu", "gres/gpu", "node")}
            starts.append({"begin": int(begin), "end": int(end), "elapsed": int(elapsed)} | numbers)
        if name == f"{job.id}.extern":
            starts[-1]["joules"] = int(joules)
    return starts


def told(project: Project, *flags: str) -> tuple[list[str], dict[str, dict[str, str]]]:
    """Return the lines of `costs`, and the rows of `costs --csv` by the run's name."""
    path = project.root / "runs.csv"
    words = ("-m", "demo", "costs", f"--csv={path}", *flags)
    done = project.cluster.run(".venv/bin/python", *words, cwd=project.root)
    assert not done.stderr
    with path.open(newline="") as file:
        return done.stdout.splitlines(), {
            r["folder"].split("/")[-1]: r for r in csv.DictReader(file)
        }


def attempts(job: Job) -> list[dict[str, Any]]:
    """Return the usage of each attempt, the first one first."""
    paths = sorted((job.run_dir / "attempts").glob("?-usage.json"))
    return [json.loads(path.read_text()) for path in paths]


def check_hours(job: Job, row: dict[str, str], starts: list[dict[str, Any]]) -> None:
    """Compare a row of a run with the starts of its job."""
    for unit, column in (("cpu", "CPU_hours"), ("gres/gpu", "GPU_hours")):
        units = max(start[unit] for start in starts)
        slurms = sum(start["elapsed"] * start[unit] for start in starts) / 3600
        assert abs(float(row[column]) - slurms) <= units * END * len(starts) / 3600, (row, starts)
    seconds = float(row["wall_hours"]) * 3600 - sum(start["elapsed"] for start in starts)
    print(f"{row['folder']}: {row['attempts']} attempts, {len(starts)} starts, {seconds:+.1f} s")


@pytest.mark.shows("python -m demo costs *")
def test_hours_and_energy_are_those_of_slurm(project: Project) -> None:
    """Of a job on the GPUs of two nodes that is requeued."""
    job = project.sbatch(*ON_GPUS, *FLAGS, "--batch-size=64", "--epochs=1").wait_for_step(30)
    for rank in job.ranks().values():
        rank.suspend()  # training might end before
    project.cluster.run("scontrol", "requeue", job.id)
    job.wait_for_restart()
    assert job.summary["resumed_from_step"] > 0
    starts = paid(job)
    assert len(starts) == 2
    lines, rows = told(project)
    row = rows[job.id]
    check_hours(job, row, starts)
    for start, attempt in zip(starts, attempts(job), strict=True):
        assert abs(attempt["began"] - start["begin"]) <= 2, (start, attempt)
        assert abs(attempt["until"] - start["end"]) <= END, (start, attempt)
        assert attempt["gpus"] == start["gres/gpu"] == attempt["nodes"] == start["node"] == 2
        assert attempt["cpus"] == start["cpu"]
    # The nodes draw what the meter says. Ranks that save go on after the step `extern` has ended.
    externs = sum(start["joules"] for start in starts)
    elapsed = sum(start["elapsed"] for start in starts)
    assert externs == pytest.approx(2 * accounts.WATTS * elapsed, rel=0.4)
    assert 0.99 * externs < 3.6e6 * float(row["node_kWh"]) < 1.3 * externs
    header, group, total, known = lines
    assert header.split()[:5] == ["experiment", "week", "user", "runs", "attempts"]
    week = time.strftime("%G-W%V", time.localtime(starts[0]["begin"]))
    assert group.split()[:5] == ["demo", week, "root", "1", "2"]
    assert total.split()[:3] == ["total", "1", "2"]
    assert known.split() == ["of", "attempts", *["2"] * 6]
    assert row["status"] == "finished" and float(row["best_score"]) > 0.5


def test_the_next_job_runs_with_what_the_last_line_asks_for(project: Project) -> None:
    """Each rank joins a group with a limit, since these nodes do not limit the memory of jobs."""
    site = project.root / "slurm/site.sh"
    kept, join = site.read_text(), project.root / "join.sh"
    script = ("--ntasks-per-node=1", "slurm/train_cpu.sbatch", *FLAGS, "--max-steps=40")
    with limited(8 * 2**30) as (group, *_):
        join.write_text(f"#!/bin/sh\necho $PPID >{group}/cgroup.procs\n")
        join.chmod(0o755)
        site.write_text(f"export SLURM_TASK_PROLOG={join}\n")
        try:
            first = project.sbatch("--mem=8G", "--time=30", "--cpus-per-task=4", *script)
            options = next_time(first)
            names = [each.split("=")[0] for each in options]
            assert names == ["--mem", "--time", "--cpus-per-task"]
            project.cluster.run("sbatch", "--test-only", *options, *script, cwd=project.root)
            set_limit(group, memory := options[0].split("=")[1])
            second = project.sbatch(*options, *script)
            assert second.summary["global_step"] == 40
        finally:
            site.write_text(kept)
    before, now = first.facts, second.facts
    assert int(now["NumCPUs"]) < int(before["NumCPUs"])
    assert (before["TimeLimit"], now["TimeLimit"]) == ("00:30:00", "00:10:00")
    assert (before["MinMemoryNode"], now["MinMemoryNode"]) == ("8G", memory)


def next_time(job: Job) -> list[str]:
    """Return the options of sbatch in the last line of a run's cost."""
    assert job.summary["global_step"] == 40
    return re.findall(r"--[a-z-]+=\S+", "".join(re.findall("next time: sbatch.*", job.log)))


@pytest.mark.slow
def test_restarts_and_kills_are_paid_once(project: Project) -> None:
    """Of a task of an array that loses a rank and starts again, until its node's processes die."""
    array = project.sbatch("--array=3", "--no-requeue", *ON_CPUS, *ENDLESS)
    job = Job(project, f"{array.id}_3").wait_for_step(20)
    raw = job.facts["JobId"]
    Job(project, raw).ranks()[1].kill()
    wait_for((job.run_dir / "attempts/2-usage.json").exists, lambda: job.log)
    job.wait_for_step(job.metrics()[-1]["step"] + 50)
    alive = Job(project, raw)
    alive.batch_shell().kill()
    for rank in alive.ranks().values():
        rank.kill()
    killed = time.time()
    job.wait()
    starts = paid(alive)
    _, rows = told(project, str(job.run_dir))
    check_hours(alive, rows[job.id], starts)
    first, second = attempts(job)
    assert abs(first["began"] - starts[0]["begin"]) <= 2
    assert second["began"] == first["until"]
    assert killed - 20 < second["until"] <= killed
    assert 3.6e6 * float(rows[job.id]["node_kWh"]) == pytest.approx(starts[0]["joules"], rel=0.2)


@pytest.mark.slow
def test_a_job_whose_node_is_lost(cluster: Cluster, project: Project) -> None:
    job = project.sbatch(*ON_GPUS, *ENDLESS, "--timeout=20").wait_for_step(20)
    assert job.facts["NodeList"] == "n[1-2]"
    cluster.cut_off("n2")
    try:
        job.wait_for_restart().wait_until("RUNNING")
        wait_for((job.run_dir / "attempts/2-usage.json").exists, lambda: job.log)
        cluster.run("scancel", job.id)
        job.wait()
    finally:
        cluster.mend("n2")
    _, rows = told(project, str(job.run_dir))
    check_hours(job, rows[job.id], paid(job))
