"""Rendered projects to train in, and ranks to train with."""

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
from typing import Any

import metrics
import psutil
import pytest
from renderer import render_project, shrink

from .fork_server import READ_AT_START, Fork, ForkServer

# Long enough for a slow machine; a rank that takes longer hangs.
PATIENCE = 300
# For a training that is to be stopped once something else has started, which may take long.
PACED = {"STEP_SECONDS": "0.2"}
# Enough to see training at work, in seconds and without any file.
QUICK = ("--dataset=synthetic", "--device=cpu", "--trackers=none", "--max-steps=30")


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the default answers except torchrun: its code serves both launchers.

    Its network is small. Its package can be imported as `demo`.
    """
    folder = render_project(tmp_path_factory.mktemp("project") / "demo", launcher="torchrun")
    sys.path.insert(0, str(folder / "src"))
    return shrink(folder)


def edited(project: Path, folder: Path, module: str, old: str, new: str) -> Path:
    """Return a copy of a project in which a text of a module is another one."""
    copy = folder / "demo"
    shutil.copytree(project, copy)
    path = copy / "src" / "demo" / module
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return copy


@pytest.fixture(scope="session")
def full_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with everything that an answer can add to the package, and a small network."""
    folder = render_project(
        tmp_path_factory.mktemp("full") / "demo",
        setup="full",
        trackers=["tensorboard", "wandb", "aim", "mlflow", "trackio"],
        sweep="optuna",
    )
    return shrink(folder)


@dataclass
class Job:
    """Ranks that were started together, and what they said."""

    processes: list[subprocess.Popen | Fork]
    logs: list[Path]
    run_dir: Path
    codes: list[int] = field(default_factory=list)

    def wait(self) -> "Job":
        """Wait for all ranks; a rank that hangs fails the test, and none is left behind."""
        try:
            self.codes = [process.wait(PATIENCE) for process in self.processes]
        finally:
            self.kill()
        return self

    def family(self) -> list[psutil.Process]:
        """Return the processes that were started and still run, and all that they started."""
        found = []
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                first = psutil.Process(process.pid)
                found += [first, *first.children(recursive=True)]
        return [each for each in found if each.is_running()]

    def kill(self) -> None:
        """End what still runs, with everything that it started."""
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):  # it left just now, since another rank is gone
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def wait_for_step(self, step: int) -> None:
        """Return once the run has logged the step."""
        deadline = time.monotonic() + PATIENCE
        while not metrics.logged(self.run_dir, step):
            assert self.processes[0].poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def interrupt(self, step: int, tracker: str, saved: bool = True) -> None:
        """Kill the ranks once the tracker has started and the run has logged the step.

        `saved`: once there is a checkpoint, too.
        """
        self.wait_for_tracker(step, tracker, saved)
        self.kill()

    def wait_for_tracker(self, step: int, tracker: str, saved: bool = True) -> None:
        """Return once it has started, and a checkpoint is there, which is written behind it."""
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
        """Everything that the ranks wrote."""
        return "\n".join(path.read_text() for path in self.logs)

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary.json; the ranks must all have ended well."""
        assert set(self.codes) == {0}, self.log
        return json.loads((self.run_dir / "summary.json").read_text())

    def metrics(self) -> list[dict[str, float]]:
        """The whole lines of the run's metrics.jsonl."""
        return metrics.read(self.run_dir)


def free_port() -> str:
    """Return a port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def clean_environment(project: Path) -> dict[str, str]:
    """Return an environment in which only the project's source and one thread are set."""
    mine = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(project / "src")}


@functools.cache
def fork_server() -> ForkServer:
    """Return what starts ranks; it ends with the process that runs the tests."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def spawn(
    project: Path, run_dir: Path, commands: Sequence[list[str]], envs: Sequence[dict[str, str]]
) -> Job:
    """Start commands at the same time, each in its own process group."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    logs = [run_dir.with_name(f"{run_dir.name}.{number}.log") for number in range(len(commands))]
    processes: list[subprocess.Popen | Fork] = []
    for command, env, path in zip(commands, envs, logs, strict=True):
        whole = {**clean_environment(project), **env}
        with path.open("w") as log:
            forked = "." not in command[0]  # torchrun starts ranks of its own
            if forked and not any(name.startswith(READ_AT_START) for name in env):
                processes.append(fork_server().start(command, project, whole, path))
                continue
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command],
                    cwd=project,
                    env=whole,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    return Job(processes, logs, run_dir)


def tasks(ranks: int, **env: str) -> list[dict[str, str]]:
    """Return the environments that srun gives its tasks on this machine."""
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
    """Start `train` on ranks in the environment that srun gives its tasks."""
    command = ["demo", "train", f"--run-dir={run_dir}", *QUICK, *flags]
    return spawn(project, run_dir, [command] * ranks, tasks(ranks, **env))


def torchrun(project: Path, run_dir: Path, nodes: int, ranks_per_node: int, *flags: str) -> Job:
    """Start `train` through torchrun, once for each node."""
    command = [
        "demo.engine.torchrun",
        f"--nnodes={nodes}",
        f"--nproc-per-node={ranks_per_node}",
        "--rdzv-id=77",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        *["-m", "demo", "train", f"--run-dir={run_dir}", *QUICK, *flags],
    ]
    # Slurm's variables are those of the one task a node that runs torchrun.
    envs = [
        {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(nodes)}
        | {"SLURM_PROCID": str(node), "SLURM_LOCALID": "0"}
        for node in range(nodes)
    ]
    return spawn(project, run_dir, [command] * nodes, envs)


Launch = Callable[..., Job]


@pytest.fixture
def launch(project: Path, tmp_path: Path) -> Launch:
    """Return what trains on some ranks to the end, in tmp_path/run unless `--run-dir` says else."""

    def train(ranks: int, *flags: str, name: str = "run", **env: str) -> Job:
        return srun(project, tmp_path / name, ranks, *flags, **env).wait()

    return train


def sign(path: Path, *files: Path) -> None:
    """Write the digests of a checkpoint, as someone can who plants one."""
    lines = [
        f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.relative_to(path.parent)}\n"
        for each in files
    ]
    path.with_suffix(".sha256").write_text("".join(lines))
