"""Each name that the code uses and PyTorch does not document is listed, and this PyTorch has it."""

import ast
import inspect
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from renderer import TEMPLATE

PACKAGE = TEMPLATE / "template/src/{{ package_name }}"
# Any new version of PyTorch may change these.
PRIVATE = {
    "torch.utils._python_dispatch.TorchDispatchMode": "plugins/flops/counter.py",
    "memory._record_memory_history": "plugins/profile.py",
    "memory._dump_snapshot": "plugins/profile.py",
}
# Modules of PyTorch, or what is taken from them, by the names that the code uses.
TORCH = ("torch", "nn", "dist", "dcp", "filesystem", "memory", "metadata", "DTensor")


def private_names(path: Path) -> Iterator[str]:
    """Yield the private names of PyTorch that a module imports, or takes from it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*str(node.module).split("."), *(each.name for each in node.names)]
        elif isinstance(node, ast.Attribute):
            names = ast.unparse(node).split(".")
            names = names if names[0] in TORCH else []
        else:
            continue
        if any(name.startswith("_") and not name.startswith("__") for name in names):
            yield ".".join(names)


def test_they_are_listed() -> None:
    found = {
        name: str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for name in private_names(path)
    }
    assert found == PRIVATE


def broken(name: str) -> str:
    """Return the error of a test if this version of PyTorch changed a name."""
    return f"torch {torch.__version__} changed {name}"


def test_the_recording_of_memory_has_its_options(project: Path) -> None:
    """Without a GPU, only the names and the options can be looked at."""
    from torch.cuda import memory

    options = inspect.signature(memory._record_memory_history_impl).parameters
    assert {"enabled", "max_entries", "stacks"} <= set(options), broken("_record_memory_history")
    options = inspect.signature(memory._dump_snapshot).parameters
    assert "filename" in options, broken("_dump_snapshot")


def test_exit_codes_of_ranks_are_noted(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rank that takes longer to end than torchrun waits for by itself."""
    from demo.tools.torchrun import note_exit_codes
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
    from torch.distributed.elastic.multiprocessing.api import PContext

    monkeypatch.setattr(PContext, "close", PContext.close)  # put back at the end
    codes = note_exit_codes(seconds=60)
    ready = tmp_path / "ready"
    script = f"trap 'sleep 1; exit 7' TERM; touch {ready}; sleep 60 & wait"
    ranks = start_processes(
        "demo", "bash", {0: ("-c", script)}, {0: {}}, DefaultLogsSpecs(str(tmp_path / "logs"))
    )
    while not ready.exists():
        time.sleep(0.01)
    ranks.close(signal.SIGTERM, timeout=0)
    assert codes == {7}, broken("PContext.close")
