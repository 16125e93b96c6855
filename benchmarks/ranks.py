"""Renders the project that is measured, and starts ranks of it and of its peers."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import copier

REPOSITORY = Path(__file__).parents[1]
CONTESTANTS = Path(__file__).parent / "contestants"


@dataclass(frozen=True)
class Setting:
    """What all contestants share.

    Attributes:
        device: cpu or cuda.
        ranks: processes that train together.
        threads: of each rank.
        data_dir: folder of MNIST's files; None for synthetic digits.
    """

    device: str
    ranks: int
    threads: int
    data_dir: Path | None

    @property
    def flags(self) -> list[str]:
        """Flags of `train`."""
        data = [f"--data-dir={self.data_dir}"] if self.data_dir else ["--dataset=synthetic"]
        return [f"--device={self.device}", *data]


@cache
def project() -> Path:
    """Return a project with the default answers, whose package is `demo`."""
    folder = Path(tempfile.mkdtemp(prefix="benchmarks-")) / "demo"
    copier.run_copy(
        str(REPOSITORY),
        folder,
        data={"package_name": "demo"},
        defaults=True,
        vcs_ref="HEAD",
        quiet=True,
    )
    return folder


def start(setting: Setting, *arguments: str, ranks: int | None = None, **env: str) -> str:
    """Run a program on all ranks, by torchrun; return what it printed.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={ranks or setting.ranks}", *arguments],
        cwd=project(),
        env={**environment(setting), **env},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def train(setting: Setting, *flags: str, ranks: int | None = None) -> Path:
    """Train the project, as its user would; return the run's folder."""
    run_dir = Path(tempfile.mkdtemp(dir=project().parent)) / "run"
    start(
        setting, "-m", "demo", "train", f"--run-dir={run_dir}", *setting.flags, *flags, ranks=ranks
    )
    return run_dir


def peer(setting: Setting, name: str, **options: object) -> float:
    """Run a contestant and return the one figure that it prints."""
    env = {f"BENCHMARK_{key.upper()}": str(value) for key, value in options.items()}
    output = start(setting, str(CONTESTANTS / f"{name}.py"), **env)
    return float(json.loads(output.splitlines()[-1])["figure"])


def lines(run_dir: Path) -> Sequence[dict[str, float]]:
    """Return a run's metrics, a dictionary for each line."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def environment(setting: Setting) -> dict[str, str]:
    """Return the environment that all contestants have."""
    return {
        **os.environ,
        "PYTHONPATH": f"{project() / 'src'}:{CONTESTANTS}",
        "OMP_NUM_THREADS": str(setting.threads),
        "BENCHMARK_DEVICE": setting.device,
        "BENCHMARK_DATA": str(setting.data_dir or ""),
    }
