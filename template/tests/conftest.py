"""Fixtures for all tests: the modules of this project's package, and a function to start ranks."""

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest

ROOT = Path(__file__).parents[1]
(PACKAGE,) = (path.parent.name for path in (ROOT / "src").glob("*/__main__.py"))
# A training of a few seconds that needs no file and logs nothing to your trackers.
QUICK = ["--dataset=synthetic", "--device=cpu", "--trackers=none"]
QUICK += ["--max-steps=40", "--checkpoint-every=10"]


@pytest.fixture(scope="session")
def package() -> Callable[[str], ModuleType]:
    """Return a function that imports a module of the package."""
    return lambda name: importlib.import_module(f"{PACKAGE}.{name}")


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., list[subprocess.Popen]]:
    """Return a function that starts a command on some ranks, as srun does.

    A training has the run folder tmp_path/run.
    """

    def start_ranks(
        ranks: int, *flags: str, command: str = "train", **pipes: IO | int
    ) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(ranks),
            "PYTHONPATH": str(ROOT / "src"),
            "NOTIFY_URL": "",  # otherwise it may come from .env
        }
        own = [f"--run-dir={tmp_path}/run", *QUICK] if command == "train" else []
        return [
            subprocess.Popen(
                [sys.executable, "-m", PACKAGE, command, *own, *flags],
                env={**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
                cwd=ROOT,
                **pipes,
            )
            for rank in range(ranks)
        ]

    return start_ranks
