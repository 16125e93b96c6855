"""The costs of a run, and where its time went, compared with other measurements."""

import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cgroups import limited

from .conftest import PACED, Launch, edited, python, srun

GIB = 2**30
Lines = Callable[..., list[str]]


@pytest.fixture
def usage(project: Path) -> ModuleType:
    """The module."""
    from demo.plugins.usage import costs as usage

    return usage


@pytest.fixture
def lines(project: Path) -> Lines:
    """The function that says what a run cost."""
    from demo.plugins.usage.lines import lines

    return lines


@pytest.fixture
def cgroups() -> Iterator[list[Path]]:
    """Folders of a cgroup with a limit of 3 GiB, which processes can be moved to."""
    with limited(3 * GIB) as folders:
        yield folders


def attempts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the files of a run's attempts."""
    paths = sorted((run_dir / "attempts").glob("*-usage.json"))
    return [json.loads(path.read_text()) for path in paths]


def test_the_parts_are_the_whole(launch: Launch) -> None:
    job = launch(2, "--checkpoint-every=10", "--validate-every=10")
    (attempt,) = attempts(job.run_dir)
    seconds = attempt["seconds"]
    assert sum(seconds.values()) == pytest.approx(attempt["wall_seconds"])
    assert attempt["wall_seconds"] == pytest.approx(attempt["until"] - attempt["began"])
    assert seconds.pop("profile") == 0 and min(seconds.values()) > 0
    started = json.loads((job.run_dir / "attempts/1.json").read_text())["began"]
    assert attempt["began"] < started < attempt["until"] <= time.time()
    # Both are from one clock, and differ by the time after the last step; each step has a pause.
    assert 30 * 0.01 < job.summary["trained_seconds"] < seconds["steps"] + seconds["data"]
    found = job.summary["usage"]
    assert found["attempts"] == 1 and found["wall_seconds"] <= attempt["wall_seconds"]
    assert found["cpu_hours"] == pytest.approx(found["wall_seconds"] * 2 / 3600)
    assert found["gpu_hours"] == 0
    said = [line.partition("] ")[2].partition(":")[0] for line in job.log.splitlines()]
    assert [each for each in said if each in ("cost", "time", "speed", "CPUs", "test")] == [
        *("cost", "time", "speed", "CPUs", "test")
    ]


def test_the_wait_for_data_is_that_of_the_slowest_rank(project: Path, tmp_path: Path) -> None:
    slow = edited(
        project,
        tmp_path,
        "engine/data/steps.py",
        "self.ahead = list(islice(",
        "time.sleep(0.05 * int(__import__('os').environ['SLURM_PROCID']))\n"
        "                    self.ahead = list(islice(",
    )
    module = slow / "src/demo/plugins/usage/lines.py"
    module.write_text(module.read_text().replace("LEAST = 60.0", "LEAST = 1.0"))
    job = srun(slow, tmp_path / "run", 2, "--max-steps=40").wait()
    found = job.summary["usage"]
    first, second = (each["data_seconds"] for each in found["ranks"])
    assert second >= 40 * 0.05
    assert first < second / 2
    training = found["seconds"]["steps"] + found["seconds"]["data"]
    share = f"{second / training:.0%}"
    assert f"rank 1 waited {share} of" in job.log
    assert f"{second / found['wall_seconds']:.0%} waiting for data" in job.log


def test_checkpoints_and_hooks_of_validations_are_no_training(
    project: Path, tmp_path: Path
) -> None:
    """In the middle of an epoch, too: the speed is that of the steps."""
    slow = edited(
        project,
        tmp_path,
        "engine/checkpoint.py",
        "        norm = parameter_norm(",
        "        time.sleep(0.2)\n        norm = parameter_norm(",
    )
    model = slow / "src/demo/model.py"
    hook = "    def on_evaluation_start(self, training, split):\n        import time\n\n"
    model.write_text(f"{model.read_text()}\n{hook}        time.sleep(0.5)\n")
    job = srun(slow, tmp_path / "run", 1, "--checkpoint-every=3", "--validate-every=10").wait()
    seconds = job.summary["usage"]["seconds"]
    assert seconds["checkpoints"] > 10 * 0.2 and seconds["validation"] > 3 * 0.5
    assert job.summary["trained_seconds"] < seconds["steps"] + seconds["data"]


def test_memory_and_cores_are_those_of_the_kernel(
    project: Path, tmp_path: Path, cgroups: list[Path]
) -> None:
    """What a rank takes for a moment between two log lines is seen, and a loading worker's work."""
    copy = edited(
        project,
        tmp_path,
        "model.py",
        "    def measure(",
        "    def on_step(self, training):\n"
        "        if training.position.step == 3 and training.world.rank == 1:\n"
        "            torch.ones(2**27)\n\n"
        "    def measure(",
    )
    job = srun(copy, tmp_path / "run", 2, "--workers=1")
    for process in job.processes:
        for folder in cgroups:
            (folder / "cgroup.procs").write_text(str(process.pid))
    job.wait()
    found = job.summary["usage"]
    first, second = found["ranks"]
    # Each may be measured with or without the rank's loading worker, which has 0.1 GiB of its own.
    assert second["gib"] - first["gib"] == pytest.approx(0.5, abs=0.2)
    assert {each["node_limit_gib"] for each in found["ranks"]} == {3}
    peak = next(filter(Path.exists, (cgroups[0] / name for name in PEAK)))
    assert 0.2 < first["node_gib"] <= int(peak.read_text()) / GIB
    assert f"{first['node_gib']:.1f} of 3.0 GiB on" in job.log
    used = sum(each["cpu_seconds"] for each in found["ranks"])
    # The figures are drawn after the last sample.
    assert used == pytest.approx(cpu_seconds(cgroups[-1]), rel=0.3)


PEAK = ("memory.max_usage_in_bytes", "memory.peak")


def cpu_seconds(folder: Path) -> float:
    """Return the CPU seconds of all processes in a cgroup."""
    if (folder / "cpuacct.usage").exists():
        return int((folder / "cpuacct.usage").read_text()) / 1e9
    return int((folder / "cpu.stat").read_text().split()[1]) / 1e6


@pytest.mark.parametrize("version", [1, 2])
def test_the_innermost_limit_counts(usage: ModuleType, tmp_path: Path, version: int) -> None:
    """Slurm makes such groups: a step inside a job, of which only the job has a limit."""
    from demo.plugins.usage.machine import cgroup_memory

    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    root = tmp_path / "memory" if version == 1 else tmp_path
    none = str(2**63 - 4096) if version == 1 else "max"
    groups = tmp_path / "groups"
    line = "4:memory:/slurm/job_7/step_0\n0::/" if version == 1 else "0::/slurm/job_7/step_0"
    groups.write_text(f"9:name=systemd:/\n{line}\n")
    assert cgroup_memory(groups, tmp_path) is None
    for folder, limit in (("slurm", GIB // 4), ("slurm/job_7", GIB), ("slurm/job_7/step_0", none)):
        (root / folder).mkdir(parents=True)
        values = (limit, GIB // 2, f"anon 1\n{names[2]} {GIB // 8}\nother 3")
        for name, value in zip((*names[:2], "memory.stat"), values, strict=True):
            (root / folder / name).write_text(f"{value}\n")
    assert cgroup_memory(groups, tmp_path) == (0.375, 1)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_all_attempts_count(project: Path, tmp_path: Path, ranks: int) -> None:
    """Stopped, killed, and at the end on another number of ranks."""
    folder, flags = tmp_path / "run", ("--checkpoint-every=5", "--log-every=1", "--max-steps=400")
    began = time.time()
    stopped = srun(project, folder, 2, *flags, **PACED)
    stopped.wait_for_step(20)
    for rank in stopped.processes:
        rank.send_signal(signal.SIGTERM)
    assert stopped.wait().codes == [75, 75]
    assert "in 1 attempt" in stopped.log
    killed = srun(project, folder, 2, *flags, **PACED)
    killed.wait_for_step(26)
    killed.kill()
    last = srun(project, folder, ranks, *flags[:2], "--max-steps=35").wait()
    each, found = attempts(folder), last.summary["usage"]
    # A stop measures the use of the ranks again, seconds after the last measurement.
    assert each[0]["ranks"][0]["seconds"] > each[0]["wall_seconds"] / 2
    assert [one["attempts"] for one in each] == [1, 1, 1]
    assert found["attempts"] == 3 and "in 3 attempts" in last.log
    # The last one goes on while its ranks leave.
    for name in ("wall_seconds", "cpu_hours"):
        parts = [one[name] for one in each]
        assert sum(parts[:2]) < found[name] <= sum(parts), name
    assert each[1]["wall_seconds"] > 0
    # A process knows when the machine started to a second, and its own start relative to that.
    assert found["wall_seconds"] < time.time() - began + 1
    assert sum(found["seconds"].values()) == pytest.approx(found["wall_seconds"])
    of_rank_1 = [one["ranks"][1]["cpu_seconds"] for one in each if len(one["ranks"]) > 1]
    assert found["ranks"][1]["cpu_seconds"] == pytest.approx(sum(of_rank_1), rel=0.2)
    assert len(found["ranks"]) == 2


def test_a_run_that_fails_says_what_it_cost(launch: Launch) -> None:
    job = launch(1, "--lr=1e30", "--clip-norm=None", "--log-every=1")
    assert job.codes == [1] and "error: train/loss is" in job.log
    (attempt,) = attempts(job.run_dir)
    assert "cost: 0:0" in (job.run_dir / "log.txt").read_text() and attempt["until"]


def test_a_job_is_paid_from_its_start(
    usage: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second counts once, also before the ranks start and between two attempts of a job."""
    (tmp_path / "attempts").mkdir()
    now = time.time()
    monkeypatch.setenv("PAID_SINCE", str(now - 10_000))
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "4(x2),8")
    for number in (1, 2):
        (tmp_path / f"attempts/{number}.json").touch()
        file = usage.UsageFile(tmp_path, workers=0)
        ranks = [usage.Rank(**RANK), usage.Rank(**RANK)]
        ranks += [usage.Rank(**{**RANK, "host": "n2", "gpus": 2})]
        file.write(ranks, {}, {part: 0.0 for part in usage.PARTS})
    first, second = usage.read(tmp_path).values()
    assert (first.nodes, first.cpus, first.gpus) == (2, 16, 6)
    assert first.wall_seconds == pytest.approx(10_000, abs=100)
    assert second.wall_seconds == pytest.approx(0, abs=100)
    both = usage.total(tmp_path)
    assert both.gpu_hours == pytest.approx(6 * 10_000 / 3600, rel=0.01)
    assert both.cpu_hours == pytest.approx(16 * 10_000 / 3600, rel=0.01)
    # What a trial of a sweep costs begins with its own process.
    monkeypatch.setenv("SWEEP_TRIAL", "1")
    assert usage.UsageFile(tmp_path / "trial", workers=0).usage.began > now - 10_000 + 100


def test_a_clock_that_was_set_back_costs_nothing(usage: ModuleType, tmp_path: Path) -> None:
    """The attempt before ended in an hour, as its node says; then this clock is set back."""
    (tmp_path / "attempts").mkdir()
    for number, later in ((1, 3600), (2, 0)):
        (tmp_path / f"attempts/{number}.json").touch()
        file = usage.UsageFile(tmp_path, workers=0)
        file.write([usage.Rank(**RANK)], {}, {part: 1.0 for part in usage.PARTS})
        if later:
            path = tmp_path / "attempts/1-usage.json"
            path.write_text(
                json.dumps({**json.loads(path.read_text()), "until": time.time() + later})
            )
    second = usage.read(tmp_path)[2]
    assert len(usage.PARTS) <= second.wall_seconds < 60 and second.began <= second.until
    file.usage.began += 7200
    file.write([usage.Rank(**RANK)], {}, {part: 1.0 for part in usage.PARTS})
    assert usage.read(tmp_path)[2].wall_seconds == len(usage.PARTS)


def test_workers_share_memory_with_their_rank(project: Path) -> None:
    """Half a gibibyte that three processes have counts once."""
    code = """
import os, signal, torch
from demo.plugins.usage.machine import Machine
data = torch.ones(2**27)
machine = Machine(torch.device("cpu"))
children = []
for _ in range(2):
    if not (child := os.fork()):
        data.sum()
        signal.pause()
    children.append(child)
machine.sample()
print(machine.describe().gib)
for child in children:
    os.kill(child, signal.SIGKILL)
machine.close()
"""
    new = {"PYTHONUNBUFFERED": "1"}  # a new process: a fork shares memory with the one before
    assert 0.5 < float(python(project, code, **new)) < 1


def test_a_gpu_that_does_not_answer_holds_nothing_up(project: Path) -> None:
    from demo.plugins.usage import machine

    asked, released = threading.Event(), threading.Event()

    class Lost:
        """A GPU whose library never answers."""

        def utilization(self, _device: object) -> float:
            asked.set()
            released.wait()
            return 0

    watched = machine.Machine(torch.device("cpu"))
    watched.gpu = Lost()
    assert asked.wait(30)
    closing = threading.Thread(target=watched.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    released.set()


RANK: dict[str, Any] = {
    **{"host": "n1", "gpu": "NVIDIA A100", "gpus": 4, "cpus": 8, "seconds": 100.0},
    **{"cpu_seconds": 700.0, "data_seconds": 1.0, "gpu_seconds": 90.0, "gpu_joules": 36000.0},
    **{
        "gib": 5.0,
        "node_gib": 50.0,
        "node_limit_gib": 64.0,
        "gpu_gib": 70.0,
        "gpu_limit_gib": 80.0,
    },
}


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({}, ""),
        ({"data_seconds": 38.0}, "rank 1 waited 38%.*--workers auto"),
        ({"gpu_seconds": 31.0}, "the GPUs computed 31%.*--batch-size"),
        ({"gpu_gib": 9.0}, "9.0 of 80.0 GiB.*--batch-size"),
        ({"cpu_seconds": 110.0}, "1.1 of 8 cores.*ask for fewer"),
        ({"node_gib": 6.0}, "6.0 of 64.0 GiB.*ask for less"),
    ],
)
def test_advice_is_given_where_it_is_plain(
    usage: ModuleType, lines: Lines, changes: dict[str, float], advice: str
) -> None:
    both = changes if "data_seconds" not in changes else {}
    seconds = {**dict.fromkeys(usage.PARTS, 0.0), "steps": 100.0}
    cost = usage.Usage(
        began=0,
        wall_seconds=100,
        seconds=seconds,
        ranks=[usage.Rank(**{**RANK, **both}), usage.Rank(**{**RANK, **changes})],
    )
    cost.job = "7"
    said = lines(cost, True)[-1]
    assert re.match(f"advice: {advice}" if advice else "CPUs: ", said)
    if "data_seconds" not in changes and "gpu_seconds" not in changes:
        cost.job = None  # nobody was asked for cores and memory
        assert ("advice" in lines(cost, True)[-1]) == ("gpu_gib" in changes)
    cost.seconds = {**seconds, "steps": 30.0}
    assert "advice" not in lines(cost, True)[-1]


# A run of 70 minutes in a job of 4 hours, which has 64 GiB, and 8 cores for each of its two ranks.
ASKED: dict[str, Any] = {
    **{"began": 0, "wall_seconds": 4200.0, "cpus": 16, "job": "7", "workers": 2},
    **{"options": ["cpus-per-task", "mem"], "task_cpus": 8},
    **{"limit_seconds": 4 * 3600.0, "lead_seconds": 120.0},
}
LITTLE: dict[str, Any] = {**RANK, "cpu_seconds": 310.0, "gib": 8.1, "node_gib": 14.0}
CHANGED = {
    # 1.25 times the memory of both ranks, in GiB; the time and the lead in 10 minutes; the cores.
    "all": ({}, {}, {"mem": "21G", "time": "01:40:00", "cpus-per-task": "4"}),
    "the node's peak": ({}, {"node_gib": 16.3}, {"mem": "21G"}),
    "a higher one": ({}, {"node_gib": 16.9}, {"mem": "22G"}),
    "nearly all memory": ({}, {"node_gib": 51.3}, {"mem": None, "cpus-per-task": None}),
    "just less": ({}, {"node_gib": 50.3}, {"mem": "63G"}),
    "no limit of memory": ({}, {"node_limit_gib": 0.0}, {"mem": None, "cpus-per-task": "4"}),
    "two nodes": ({}, {"host": "n2"}, {"mem": "18G"}),
    "a small node": ({}, {"host": "n2", "node_limit_gib": 18.0}, {"mem": None}),
    "memory of cores": ({"options": ["cpus-per-task"]}, {}, {"mem": None, "cpus-per-task": "4"}),
    "much of cores": (
        {"options": ["cpus-per-task"]},
        {"node_gib": 32.1},
        {"mem": None, "cpus-per-task": "6"},
    ),
    "no option": ({"options": []}, {}, {"mem": None, "cpus-per-task": None, "time": "01:40:00"}),
    "whole nodes": ({"cpus": 64}, {}, {"mem": None, "cpus-per-task": None, "time": "01:40:00"}),
    "workers": ({"workers": 6}, {}, {"cpus-per-task": "7"}),
    "all workers": ({"workers": 7}, {}, {"cpus-per-task": None}),
    "idle cores": ({"workers": 0}, {"cpu_seconds": 0.0}, {"cpus-per-task": "1"}),
    "busy cores": ({}, {"cpu_seconds": 570.0}, {"cpus-per-task": None}),
    "torchrun": ({"task_cpus": 16}, {}, {"cpus-per-task": "8"}),
    "a long lead": ({"lead_seconds": 900.0}, {}, {"time": "01:50:00"}),
    "a time that is just left": ({"limit_seconds": 6001.0}, {}, {"time": "01:40:00"}),
    "no time left": ({"limit_seconds": 6000.0}, {}, {"time": None}),
    "no time limit": ({"limit_seconds": 0.0}, {}, {"time": None}),
    "days": ({"wall_seconds": 9e4, "limit_seconds": 2e5}, {}, {"time": "31:20:00"}),
    "no job": ({"job": None}, {}, None),
}


@pytest.mark.parametrize("changes", CHANGED.values(), ids=CHANGED)
def test_the_next_job_asks_for_less_but_enough(
    usage: ModuleType,
    lines: Lines,
    changes: tuple[dict[str, Any], dict[str, Any], dict[str, str | None] | None],
) -> None:
    of_job, of_rank, expected = changes
    seconds = {**dict.fromkeys(usage.PARTS, 0.0), "steps": 590.0, "data": 10.0}
    ranks = [usage.Rank(**{**LITTLE, "cpu_seconds": 70.0}), usage.Rank(**{**LITTLE, **of_rank})]
    cost = usage.Usage(**{**ASKED, **of_job}, seconds=seconds, ranks=ranks)
    asked = next_time(lines(cost, True))
    if expected is None:
        assert not asked
        return
    assert {name: asked.get(name) for name in expected} == expected
    # What the last line asks for is not said in another one.
    advised = [each for each in lines(cost, True) if each.startswith("advice")]
    assert not (advised and "ask for" in advised[0] and {"mem", "cpus-per-task"} <= asked.keys())
    assert not next_time(lines(cost, False))  # a run that failed may need more
    cost.seconds["steps"] = 589.0
    assert not next_time(lines(cost, True))


def next_time(said: list[str]) -> dict[str, str]:
    """Return the options of sbatch in the last line of a run's cost."""
    return dict(re.findall(r"--([a-z-]+)=(\S+)", said[-1] if "sbatch" in said[-1] else ""))


def test_attempts_of_other_sizes_name_no_time(usage: ModuleType, tmp_path: Path) -> None:
    """Their times do not add up to that of a run on the ranks of the last one."""
    (tmp_path / "attempts").mkdir()
    rank = usage.Rank(**RANK)
    for ranks, limit in ((2, 3600), (2, 3600), (1, 0)):
        number = len(usage.read(tmp_path)) + 1
        (tmp_path / f"attempts/{number}.json").touch()
        content = asdict(usage.Usage(**ASKED | {"limit_seconds": 3600.0}, ranks=[rank] * ranks))
        (tmp_path / f"attempts/{number}-usage.json").write_text(json.dumps(content))
        assert usage.total(tmp_path).limit_seconds == limit


def test_the_ranks_are_told_apart(usage: ModuleType, lines: Lines) -> None:
    seconds = {**dict.fromkeys(usage.PARTS, 1.0), "steps": 94.0, "profile": 0.0}
    idle: dict[str, Any] = {
        **RANK,
        "gpu_seconds": 50.0,
        "gpu_gib": 75.0,
        "cpu_seconds": 500.0,
        "host": "n2",
    }
    cost = usage.Usage(
        **{"began": 0, "wall_seconds": 5025, "gpu_hours": 11.2, "gpu_kwh": 0.5, "cpu_hours": 90.0},
        **{"gpus": 8, "cpus": 64, "attempts": 2, "seconds": seconds},
        ranks=[usage.Rank(**RANK), usage.Rank(**idle)],
        rates={
            "samples_per_second": 12345.6,
            "rows_per_second": 12345.6,
            "tokens_per_second": 99.0,
        },
    )
    expected = (
        r"cost: 1:23:45 in 2 .*11.2 GPU-hours \(GPUs: 8\), 90 CPU-hours \(cores: 64\), 0.5 kWh.*\n"
        "time: 1% starting, 1% meeting, 94% steps, 1% waiting for data, 1% validation, "
        r"1% checkpoints, 1% ending\n"
        r"speed: 12,346 rows .*99 tokens .*\n"
        r"GPUs: busy 70% \(50% on rank 1, 90% on rank 0\) .*75.0 of 80.0 GiB on rank 1\n"
        r"CPUs: busy 6.0 \(5.0 on rank 1, 7.0 on rank 0\) of 8 .*50.0 of 64.0 GiB on n1"
    )
    assert re.fullmatch(expected, "\n".join(lines(cost, True)))


def test_damaged_files_do_not_count(usage: ModuleType, lines: Lines, tmp_path: Path) -> None:
    folder = tmp_path / "attempts"
    folder.mkdir()
    whole = asdict(usage.Usage(began=1.0, wall_seconds=60, ranks=[usage.Rank(**RANK)]))
    foreign: list[Any] = [
        *([], "x", {}, {"began": "x"}, {**whole, "seconds": {}}, {**whole, "ranks": [3]}),
        *({**whole, "ranks": [{**RANK, "gib": "x"}]}, {**whole, "rates": {"a": []}}),
        {**whole, "wall_seconds": 1e301},
    ]
    for number, content in enumerate([*foreign, whole], 1):
        (folder / f"{number}.json").touch()
        (folder / f"{number}-usage.json").write_text(json.dumps(content))
    assert [each.wall_seconds for each in usage.read(tmp_path).values()] == [60]
    strange = {**whole, "rates": {"\033[2J": 1.0}, "ranks": [{**RANK, "host": "\033[2J"}]}
    (folder / "1-usage.json").write_text(json.dumps(strange))
    assert "\033" not in "".join(lines(usage.total(tmp_path), True))
    assert usage.total(tmp_path / "none") is None
