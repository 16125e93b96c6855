"""The GPUs of this machine, a project to train on them, and the record of what was measured.

Without a GPU, the tests run on two CPU ranks, so that a machine with GPUs finds no mistakes in the
tests themselves. A test that needs a GPU is then skipped.
"""

import json
import platform
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pynvml
import pytest
import torch
from renderer import render_project, shrink
from run.conftest import Job, spawn, tasks

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = "cuda" if GPUS else "cpu"
RANKS = GPUS or 2
RECORD = pytest.StashKey[dict[str, Any]]()
GIB = 2**30
Figure = Callable[[str, float, str], None]
Envs = Sequence[dict[str, str]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the file of the record."""
    parser.addoption("--record", type=Path, help="file for what was measured and what passed")


def pytest_configure(config: pytest.Config) -> None:
    """Begin the record."""
    config.stash[RECORD] = {"machine": machine(), "tests": {}, "figures": {}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the folder to the nightly tests where there is no GPU."""
    for item in items:
        if not GPUS and Path(__file__).parent in item.path.parents:
            item.add_marker("slow")


def machine() -> dict[str, Any]:
    """Return the versions and GPUs of this machine, without its name."""
    facts: dict[str, Any] = {"date": date.today().isoformat(), "python": platform.python_version()}
    facts |= {"torch": torch.__version__, "gpus": GPUS}
    if GPUS:
        pynvml.nvmlInit()
        facts["gpu"] = torch.cuda.get_device_name()
        facts["driver"] = pynvml.nvmlSystemGetDriverVersion()
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Write down whether a test passed, or why it was skipped."""
    report = yield
    if report.when == "call" or report.outcome != "passed":
        reason = report.longrepr[2].removeprefix("Skipped: ") if report.skipped else ""
        item.config.stash[RECORD]["tests"][item.name] = {"outcome": report.outcome} | (
            {"reason": reason} if reason else {}
        )
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:  # noqa: ANN401
    """Print the record, and write it to a file."""
    record = config.stash[RECORD]
    if not record["figures"]:
        return
    terminalreporter.section("figures")
    for name, figure in record["figures"].items():
        terminalreporter.write_line(f"{name}: {figure['value']:.4g} {figure['unit']}")
    if path := config.getoption("--record", None):  # unknown if all of tests/ runs
        path.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
        terminalreporter.write_line(f"written to {path}")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Return a function that puts a figure with its unit into the record."""

    def add(name: str, value: float, unit: str) -> None:
        request.config.stash[RECORD]["figures"][name] = {"value": value, "unit": unit}

    return add


@pytest.fixture
def gpu() -> Any:  # noqa: ANN401
    """Return NVML's handle of the first GPU; skip the test if there is none."""
    if not GPUS:
        pytest.skip("needs a GPU")
    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")


@pytest.fixture
def gpus() -> int:
    """Return the number of GPUs; skip the test if there are not several."""
    if GPUS < 2:
        pytest.skip("needs several GPUs")
    return GPUS


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the network of the example."""
    return render_project(tmp_path_factory.mktemp("digits") / "demo", launcher="torchrun")


@pytest.fixture(scope="session")
def paced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a pause in each step, so that a test can stop the training."""
    return shrink(render_project(tmp_path_factory.mktemp("paced") / "demo", launcher="torchrun"))


def start(
    project: Path, run_dir: Path, *flags: str, ranks: int = RANKS, envs: Envs = (), **env: str
) -> Job:
    """Start `train` on some ranks, on GPUs if there are some."""
    own = [f"--run-dir={run_dir}", "--dataset=synthetic", "--trackers=none", f"--device={DEVICE}"]
    envs = envs or tasks(ranks, **env)
    return spawn(project, run_dir, [["demo", "train", *own, *flags]] * ranks, envs)


def train(
    project: Path, run_dir: Path, *flags: str, ranks: int = RANKS, envs: Envs = (), **env: str
) -> dict[str, Any]:
    """Train to the end, and return the summary."""
    job = start(project, run_dir, *flags, ranks=ranks, envs=envs, **env).wait()
    assert job.summary["device"].startswith(DEVICE)
    return job.summary
