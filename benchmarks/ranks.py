"""Renders the project to measure, and starts ranks of it and of other programs."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import copier
import psutil

REPOSITORY = Path(__file__).parents[1]
CONTESTANTS = Path(__file__).parent / "contestants"


@dataclass(frozen=True)
class Setting:
    """The settings that all contestants share.

    Attributes:
        device: cpu or cuda.
        ranks: number of ranks.
        threads: number of threads of each rank.
        data_dir: folder of MNIST's files; None for synthetic digits.
    """

    device: str
    ranks: int
    threads: int
    data_dir: Path | None

    @property
    def flags(self) -> list[str]:
        """The flags of `train` for these settings."""
        data = [f"--data-dir={self.data_dir}"] if self.data_dir else ["--dataset=synthetic"]
        return [f"--device={self.device}", *data]


@cache
def project(*trackers: str, **answers: str) -> Path:
    """Return a project with default answers except these; its package is `demo`."""
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) / "demo"
    chosen = {"trackers": list(trackers)} if trackers else {}
    copier.run_copy(
        str(REPOSITORY),
        folder,
        data={**chosen, **answers, "package_name": "demo"},
        defaults=True,
        vcs_ref="HEAD",
        quiet=True,
    )
    return folder


def copied(folder: Path) -> Path:
    """Return a copy of a project."""
    return Path(shutil.copytree(folder, Path(tempfile.mkdtemp(prefix="benchmarks-")) / "demo"))


@cache
def with_clock(folder: Path | None = None) -> Path:
    """Return a copy of a project that times its steps as the contestants do."""
    copy = copied(folder or project())
    shutil.copy(CONTESTANTS / "plugin.py", copy / "src" / "demo" / "plugins" / "benchmark.py")
    return copy


def start(
    setting: Setting,
    *arguments: str,
    folder: Path | None = None,
    env: Mapping[str, str] | None = None,
    python: Path = Path(sys.executable),
) -> dict[str, float]:
    """Run a program on all ranks with torchrun, in a project's folder; return its figures.

    They are the last line that it printed as JSON, and `command MiB`: the largest memory of
    torchrun and all ranks together.

    Raises:
        RuntimeError: the program failed.
    """
    command = [str(python), "-m", "torch.distributed.run", "--standalone"]
    with tempfile.TemporaryFile("w+") as printed:
        process = psutil.Popen(
            [*command, f"--nproc-per-node={setting.ranks}", *arguments],
            cwd=folder or project(),
            env={**environment(setting, folder), **(env or {})},
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        mib = peak_mib(process)
        printed.seek(0)
        output = printed.read()
    if process.wait():
        raise RuntimeError(f"{' '.join(arguments)}:\n{output[-6000:]}")
    found = [line for line in output.splitlines() if line.startswith('{"')]
    return {**(json.loads(found[-1]) if found else {}), "command MiB": mib}


def peak_mib(process: psutil.Popen) -> float:
    """Wait for a process, and return the largest memory of it and its children together, in MiB.

    A page that several of them share counts once.
    """
    largest = 0
    while True:
        with suppress(psutil.Error):
            each = [process, *process.children(recursive=True)]
            largest = max(largest, sum(one.memory_full_info().pss for one in each))
        with suppress(psutil.TimeoutExpired, subprocess.TimeoutExpired):
            process.wait(0.5)
            return largest / 2**20


def train(
    setting: Setting,
    *flags: str,
    folder: Path | None = None,
    python: Path = Path(sys.executable),
) -> Path:
    """Train the project as a user does; return the run folder."""
    run_dir = Path(tempfile.mkdtemp(dir=project().parent)) / "run"
    command = ("-m", "demo", "train", f"--run-dir={run_dir}", *setting.flags, *flags)
    start(setting, *command, folder=folder, python=python)
    return run_dir


def peer(setting: Setting, name: str, folder: Path | None = None, **options: object) -> float:
    """Run a contestant next to a project's package and return its figure."""
    return figures(setting, name, folder, **options)["figure"]


def figures(
    setting: Setting, name: str, folder: Path | None = None, **options: object
) -> dict[str, float]:
    """Run a contestant and return what it measured: its `figure`, and other numbers."""
    env = {f"BENCHMARK_{key.upper()}": str(value) for key, value in options.items()}
    return start(setting, str(CONTESTANTS / f"{name}.py"), folder=folder, env=env)


def lines(run_dir: Path) -> Sequence[dict[str, float]]:
    """Return a run's metrics, a dictionary for each line."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def environment(setting: Setting, folder: Path | None = None) -> dict[str, str]:
    """Return the environment that all contestants have."""
    # Without compiled files, Python would compile torch at every start.
    kept = {name: x for name, x in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "PYTHONPATH": f"{(folder or project()) / 'src'}:{CONTESTANTS}",
        "OMP_NUM_THREADS": str(setting.threads),
        "BENCHMARK_DEVICE": setting.device,
        "BENCHMARK_DATA": str(setting.data_dir or ""),
    }
