"""Rendered projects, and functions that start ranks in them."""

import atexit
import functools
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import metrics
import psutil
import pytest
from renderer import render_project, shrink

from .fork_server import READ_AT_START, Fork, ForkServer
from .trackers import TRACKERS

# Seconds: long enough for a slow machine. A rank that takes longer hangs.
PATIENCE = 300
# For a training that a test stops after something else has started, which may take long.
PACED = {"STEP_SECONDS": "0.2"}
# A training of a few seconds that needs no file.
QUICK = ("--dataset=synthetic", "--device=cpu", "--trackers=none", "--max-steps=30")


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with default answers, except torchrun: its code works with both launchers.

    Its network is small. Its package can be imported as `demo`.
    """
    folder = render_project(tmp_path_factory.mktemp("project") / "demo", launcher="torchrun")
    sys.path.insert(0, str(folder / "src"))
    return shrink(folder)


def edited(project: Path, folder: Path, module: str, old: str, new: str) -> Path:
    """Return a copy of a project with a text of a module replaced."""
    copy = folder / "demo"
    shutil.copytree(project, copy)
    path = copy / "src" / "demo" / module
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return copy


@pytest.fixture(scope="session")
def full_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with all modules that answers can add to the package, and a small network."""
    folder = render_project(
        tmp_path_factory.mktemp("full") / "demo",
        setup="full",
        trackers=list(TRACKERS),
        sweep="optuna",
    )
    return shrink(folder)


def own_project(folder: Path, data: str, model: str, tools: Sequence[str] = ()) -> Path:
    """Return a project with a data.py and a model.py of a test, without figures."""
    root = render_project(folder / "demo", tools=list(tools))
    (root / "configs/train.yaml").unlink()
    (root / "src/demo/data.py").write_text(data)
    (root / "src/demo/model.py").write_text(model)
    (root / "src/demo/figures.py").write_text("def draw(*_):\n    return {}\n")
    return root


@dataclass
class Job:
    """Ranks that were started together, and their output."""

    processes: list[subprocess.Popen | Fork]
    logs: list[Path]
    run_dir: Path
    codes: list[int] = field(default_factory=list)

    def wait(self) -> "Job":
        """Wait for all ranks. A rank that hangs fails the test, and all ranks are killed."""
        try:
            self.codes = [process.wait(PATIENCE) for process in self.processes]
        except subprocess.TimeoutExpired:
            codes = [process.poll() for process in self.processes]
            raise AssertionError(f"hangs, exit codes {codes}:\n{self.log}") from None
        finally:
            self.kill()
        return self

    def family(self) -> list[psutil.Process]:
        """Return the started processes that still run, and all their descendants."""
        found = []
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                first = psutil.Process(process.pid)
                found += [first, *first.children(recursive=True)]
        return [each for each in found if each.is_running()]

    def kill(self) -> None:
        """Kill all processes that still run, with all their descendants."""
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):  # it has just ended: another rank is lost
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def wait_for_step(self, step: int) -> None:
        """Wait until the run has logged the step."""
        deadline = time.monotonic() + PATIENCE
        while not metrics.logged(self.run_dir, step):
            assert self.processes[0].poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def stop(self, step: int, rank: int = -1, number: int = signal.SIGTERM) -> None:
        """Signal a rank once the run has logged the step: all ranks must save and leave with 75."""
        self.wait_for_step(step)
        self.processes[rank].send_signal(number)
        assert self.wait().codes == [75] * len(self.processes), self.log

    def interrupt(self, step: int, tracker: str, saved: bool = True) -> None:
        """Kill the ranks after the tracker has started and the run has logged the step.

        With `saved`, also wait for a checkpoint.
        """
        self.wait_for_tracker(step, tracker, saved)
        self.kill()

    def wait_for_tracker(self, step: int, tracker: str, saved: bool = True) -> None:
        """Wait until the tracker has started and, with `saved`, a checkpoint was written."""
        ids, latest = self.run_dir / "trackers.json", self.run_dir / "checkpoints/latest"
        deadline = time.monotonic() + PATIENCE
        while (
            not ids.exists()
            or tracker not in json.loads(ids.read_text())
            or (saved and not latest.exists())
        ):
            assert self.processes[0].poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)
        self.wait_for_step(step)

    @property
    def log(self) -> str:
        """The output of all ranks."""
        return "\n".join(path.read_text() for path in self.logs)

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary.json. All ranks must have succeeded."""
        assert set(self.codes) == {0}, self.log
        return json.loads((self.run_dir / "summary.json").read_text())

    def metrics(self) -> list[dict[str, float]]:
        """The complete lines of the run's metrics.jsonl."""
        return metrics.read(self.run_dir)


def free_port() -> str:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def clean_environment(project: Path) -> dict[str, str]:
    """Return an environment in which only the project's source and one thread are set."""
    mine = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    mine += tuple(f"{tracker.upper()}_" for tracker in TRACKERS)  # the user's own stores and keys
    kept = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(project / "src")}


@functools.cache
def fork_server() -> ForkServer:
    """Return the server that starts ranks. It ends with the process that runs the tests."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def command(project: Path, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the project to its end."""
    return _finished(project, ["-m", "demo", *map(str, words)], env)


def python(project: Path, code: str, *words: object, **env: str) -> str:
    """Return the output of Python code in a project, which must succeed."""
    done = _finished(project, ["-c", code, *map(str, words)], env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _finished(
    project: Path, words: list[str], env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("stdout", "stderr")]
        process = _start(project, words, env, *files)
        try:
            code = process.wait(PATIENCE)
        finally:
            process.kill()
        return subprocess.CompletedProcess(words, code, *(path.read_text() for path in files))


def _is_read_at_start(env: dict[str, str]) -> bool:
    """Say whether only a new interpreter sees all that these variables ask for."""
    added = env.get("PYTHONPATH", "").split(os.pathsep)
    names = env.keys() - {"PYTHONPATH"}
    return any(name.startswith(READ_AT_START) for name in names) or any(
        Path(folder, "sitecustomize.py").exists() for folder in added
    )


def _start(
    project: Path, words: list[str], env: dict[str, str], output: Path, errors: Path
) -> subprocess.Popen | Fork:
    """Start `python WORDS` in its own process group, as a fork if that is the same."""
    whole = {**clean_environment(project), **env}
    with output.open("w") as out, errors.open("a") as err:
        starts_ranks = words[0] == "-m" and "." in words[1]  # torchrun
        if not starts_ranks and not _is_read_at_start(env):
            return fork_server().start(words, project, whole, output, errors)
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=project,
            env=whole,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def spawn(
    project: Path, run_dir: Path, commands: Sequence[list[str]], envs: Sequence[dict[str, str]]
) -> Job:
    """Start several commands at the same time, each in its own process group."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    logs = [run_dir.with_name(f"{run_dir.name}.{number}.log") for number in range(len(commands))]
    processes = [
        _start(project, ["-m", *command], env, log, log)
        for command, env, log in zip(commands, envs, logs, strict=True)
    ]
    return Job(processes, logs, run_dir)


def tasks(ranks: int, **env: str) -> list[dict[str, str]]:
    """Return the environments of the tasks of srun on this machine."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": str(ranks),
        "SLURM_STEP_NUM_TASKS": str(ranks),
        **env,
    }
    return [{**shared, "SLURM_PROCID": str(r), "SLURM_LOCALID": str(r)} for r in range(ranks)]


def srun(project: Path, run_dir: Path, ranks: int, *flags: str, **env: str) -> Job:
    """Start `train` on ranks in the environment of srun's tasks."""
    command = ["demo", "train", f"--run-dir={run_dir}", *QUICK, *flags]
    return spawn(project, run_dir, [command] * ranks, tasks(ranks, **env))


def torchrun(project: Path, run_dir: Path, nodes: int, ranks_per_node: int, *flags: str) -> Job:
    """Start `train` through torchrun, once for each node."""
    command = [
        "demo.tools.torchrun",
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks_per_node}",
        "--rdzv-id=77",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        *["-m", "demo", "train", f"--run-dir={run_dir}", *QUICK, *flags],
    ]
    # Slurm's variables are those of the task that runs torchrun, one on each node.
    envs = [
        {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(nodes)}
        | {"SLURM_PROCID": str(node), "SLURM_LOCALID": "0"}
        for node in range(nodes)
    ]
    return spawn(project, run_dir, [command] * nodes, envs)


Launch = Callable[..., Job]


@pytest.fixture
def launch(project: Path, tmp_path: Path) -> Launch:
    """Return a function that trains on some ranks to the end, in tmp_path/run or --run-dir."""

    def train(ranks: int, *flags: str, name: str = "run", **env: str) -> Job:
        return srun(project, tmp_path / name, ranks, *flags, **env).wait()

    return train


def sign(path: Path, *files: Path) -> None:
    """Write the digests of a checkpoint, as an attacker who plants one can do."""
    lines = [
        f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.relative_to(path.parent)}\n"
        for each in files
    ]
    path.with_suffix(".sha256").write_text("".join(lines))
