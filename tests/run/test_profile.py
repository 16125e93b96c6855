"""`--profile` records the chosen steps in any kind of training, and changes nothing else."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from metrics import reproducible

from .conftest import PACED, Job, Launch, clean_environment, edited, srun

# WORKER_PATTERN and NODE_PROCESS_PATTERN of TensorBoard's plugin (pytorch/kineto, consts.py).
WORKER = re.compile(r"^(.*?)(\.\d+)?\.pt\.trace\.json(?:\.gz)?$")
NODE_PROCESS = re.compile(r"^(.*)_(\d+)")
RUN = ("--max-steps=25", "--log-every=5")
VALIDATED = (*RUN, "--validate-every=15", "--checkpoint-every=12")


def traces(run: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the traces of a run by rank, the earlier attempts first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in sorted((run / "profile").glob("*.gz")):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        worker = NODE_PROCESS.fullmatch(WORKER.fullmatch(path.name)[1])
        assert path.with_name(path.name.replace(".pt.trace.json.gz", ".txt")).exists()
        found.setdefault(int(worker[2]), []).append(trace)
    return found


def marks(trace: dict[str, Any], name: str = "ProfilerStep#") -> list[str]:
    """Return the rest of the names of a trace's events that begin with a text, in their order."""
    events = sorted((each for each in trace["traceEvents"] if "dur" in each), key=lambda e: e["ts"])
    return [e["name"].removeprefix(name) for e in events if e["name"].startswith(name)]


def steps(trace: dict[str, Any]) -> list[int]:
    """Return the steps of a trace."""
    return [int(each) for each in marks(trace)]


def show(project: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Call `profile`, which does not import torch."""
    code = "import atexit, runpy, sys\natexit.register(lambda: print('torch' in sys.modules))\n"
    code += "runpy.run_module('demo', {}, '__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, "profile", *map(str, arguments)],
        env=clean_environment(project),
        capture_output=True,
        text=True,
    )
    assert done.returncode or done.stdout.endswith("False\n"), done.stdout
    return done


@pytest.fixture(scope="module")
def plain(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same training without a profile."""
    return srun(project, tmp_path_factory.mktemp("plain") / "run", 1, *VALIDATED).wait()


def test_the_steps_of_one_rank(project: Path, plain: Job, launch: Launch) -> None:
    job = launch(1, *VALIDATED, "--profile=10:20")
    # Nothing else changes.
    assert job.summary["parameters_sha256"] == plain.summary["parameters_sha256"]
    assert reproducible(job.metrics()) == reproducible(plain.metrics())

    ((trace,),) = traces(job.run_dir).values()
    assert steps(trace) == list(range(10, 20))
    for part in ("data", "forward", "backward"):
        assert marks(trace, part) == [""] * 10, part
    assert len(marks(trace, "Optimizer.step#")) == 10
    # One after step 12, and one before and after the validation, which follows step 15.
    assert len(marks(trace, "validation")) == 1 and len(marks(trace, "checkpoints")) == 3
    events = {each["name"]: each for each in trace["traceEvents"] if "dur" in each}
    inside, whole = events["validation"], events["ProfilerStep#15"]
    assert whole["ts"] < inside["ts"] < whole["ts"] + whole["dur"]
    assert "aten::convolution_backward" in events

    (table,) = (job.run_dir / "profile").glob("*.txt")
    lines = table.read_text().splitlines()
    assert lines[0].startswith("steps 10 to 19, rank 0, cpu: ") and len(lines) == 13
    rows = [line.split(maxsplit=2) for line in lines[3:]]
    times = [float(row[0]) for row in rows]
    assert times == sorted(times, reverse=True) and times[0] > 0
    assert any(row[2].startswith("aten::") for row in rows)
    log = (job.run_dir / "log.txt").read_text()
    assert all(line in log for line in lines)
    shown = show(project, job.run_dir)
    assert shown.returncode == 0, shown.stderr
    assert table.read_text() in shown.stdout and str(table)[:-4] + ".pt.trace" in shown.stdout
    assert "https://ui.perfetto.dev" in shown.stdout
    assert sorted(os.listdir(table.parent))[0].startswith(os.uname().nodename)
    assert len(os.listdir(table.parent)) == 2


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_the_ranks_that_are_chosen(launch: Launch, strategy: str) -> None:
    flags = (*RUN, f"--strategy={strategy}", "--accumulate=2")
    job = launch(2, *flags, "--profile=10:20", "--profile-ranks", "0", "1")
    found = traces(job.run_dir)
    assert found.keys() == {0, 1}
    for rank, (trace,) in found.items():
        assert steps(trace) == list(range(10, 20))
        assert trace["distributedInfo"]["rank"] == rank
        assert len(marks(trace, "forward")) == len(marks(trace, "backward")) == 20
    assert job.log.count("steps 10 to 19, rank ") == 1

    other = launch(2, *flags, "--profile=10:20", "--profile-ranks=1", name="other")
    assert traces(other.run_dir).keys() == {1}
    assert other.summary["parameters_sha256"] == job.summary["parameters_sha256"]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_stop_in_the_middle(project: Path, launch: Launch, tmp_path: Path, strategy: str) -> None:
    flags = (*RUN, f"--strategy={strategy}", "--profile=5:20", "--log-every=1")
    ranks = ("--profile-ranks", "0", "1")
    job = srun(project, tmp_path / "run", 2, *flags, *ranks, **PACED)
    job.wait_for_step(8)
    for process in job.processes:
        process.send_signal(signal.SIGTERM)
    assert job.wait().codes == [75, 75], job.log
    stopped = int(re.search(r"stopped at step (\d+)", job.log)[1])
    assert f"steps 5 to {stopped}, rank 0" in job.log
    job = launch(2, *flags, *ranks)
    assert f"steps {stopped + 1} to 19, rank 0" in job.log
    for found in traces(job.run_dir).values():
        assert [steps(each) for each in found] == [
            list(range(5, stopped + 1)),
            list(range(stopped + 1, 20)),
        ]
    whole = launch(2, *RUN, f"--strategy={strategy}", name="whole")
    assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"]


@pytest.mark.parametrize("window", ["26:30", "30:40"])
def test_a_window_that_is_never_reached(launch: Launch, window: str) -> None:
    job = launch(1, *RUN, f"--profile={window}")  # the profiler waits for step 26 at the end
    assert job.summary["global_step"] == 25
    assert f"no step of --profile {window} was taken" in job.log
    assert not (job.run_dir / "profile").exists()


def test_the_end_of_the_run_in_the_window(launch: Launch) -> None:
    job = launch(1, *RUN, "--profile=1:100")
    ((trace,),) = traces(job.run_dir).values()
    assert steps(trace) == list(range(1, 26)) and job.summary["global_step"] == 25
    assert len(marks(trace, "validation")) == 1  # the one at the end, but not the test set


def test_an_end_in_the_window(project: Path, tmp_path: Path) -> None:
    """Python would crash with a running profiler. A profile may explain why the memory is full."""
    text = "        images, labels = batch\n        return F"
    leave = f"        if network.training and {{n}}:\n            {{what}}\n{text}"
    count = "self.__dict__.setdefault('count', []).append(0) or len(self.count) > 12"
    full = "raise torch.OutOfMemoryError('full')"
    for name, what, code, written in (
        ("exit", "raise SystemExit(3)", 3, True),
        ("full", full, 1, True),
        ("bug", "1 / 0", 1, False),
    ):
        mine = edited(project, tmp_path / name, "model.py", text, leave.format(n=count, what=what))
        job = srun(mine, tmp_path / name / "run", 1, *RUN, "--profile=10:20").wait()
        assert job.codes == [code], job.log
        assert bool(list(job.run_dir.glob("profile/*.gz"))) == written


def test_a_full_disk(project: Path, plain: Job, tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root may mount a small disk")
    folder = tmp_path / "run/profile"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder], check=True)
    try:
        job = srun(project, tmp_path / "run", 1, *RUN, "--profile=10:20").wait()
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
    assert job.log.count("write the profile") == 1 and "training goes on" in job.log
    assert "no space" in job.log.lower() and "19, rank 0, cpu" in job.log
    assert job.summary["parameters_sha256"] == plain.summary["parameters_sha256"]


@pytest.mark.parametrize("text", ["20:10", "10:10", "0:10", "abc", "1:102"])
def test_a_wrong_window(project: Path, text: str) -> None:
    from demo.engine.errors import UsageError
    from demo.plugins.profile import window

    with pytest.raises(UsageError, match=f"profile is '{text}'"):
        window(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--profile=1:102",), "profile is '1:102'"),
        (("--profile=1:2", "--profile-ranks=2"), "profile_ranks is [2]: choose from 0 to 1"),
        (("--profile=1:2", "--profile-ranks"), "profile_ranks is []: choose from 0 to 1"),
    ],
)
def test_wrong_values(launch: Launch, flags: tuple[str, ...], message: str) -> None:
    job = launch(2, *flags)
    assert 0 not in job.codes and "Traceback" not in job.log, job.log
    lines = [line for line in job.log.splitlines() if "error:" in line]
    assert all(message in line for line in lines) and lines and not job.run_dir.exists()


def test_a_run_without_a_profile(project: Path, plain: Job) -> None:
    shown = show(project, plain.run_dir)
    assert shown.returncode == 1
    assert f"error: {plain.run_dir} has no profile" in shown.stderr


def test_a_profile_from_elsewhere(project: Path, tmp_path: Path) -> None:
    folder, secret = tmp_path / "profile", tmp_path / "secret"
    folder.mkdir()
    secret.write_text("mine")
    (folder / "x_rank_0.1.txt").write_bytes(b"\x1b[2J\xff table\n")
    (folder / "x_rank_0.1.memory.pickle").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    shown = show(project, tmp_path)
    assert shown.returncode == 0 and "\x1b" not in shown.stdout and "table" in shown.stdout
    assert "https://pytorch.org/memory_viz" in shown.stdout
    (folder / "x_rank_1.2.txt").symlink_to(secret)
    shown = show(project, tmp_path)
    assert shown.returncode == 1 and "is a link" in shown.stderr and "mine" not in shown.stdout
    (folder / "x_rank_1.2.txt").unlink()
    os.mkfifo(folder / "x_rank_1.2.txt")
    assert show(project, tmp_path).returncode == 1


@pytest.mark.slow
def test_a_compiled_network(launch: Launch) -> None:
    job = launch(1, *RUN, "--compile", "--profile=10:20")
    ((trace,),) = traces(job.run_dir).values()
    assert steps(trace) == list(range(10, 20)) and len(marks(trace, "backward")) == 10
    whole = launch(1, *RUN, "--compile", name="whole")
    assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
