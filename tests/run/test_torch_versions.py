"""A run continues with another PyTorch. `make test-torch` runs this test with its Python."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import QUICK, clean_environment

OTHER = os.environ.get("OTHER_PYTHON", "")


def train(python: str, project: Path, run_dir: Path, *flags: str) -> tuple[dict, str]:
    """Train on two ranks with some Python; return the summary, and the version of PyTorch."""
    command = [python, "-m", "demo.tools.torchrun", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "demo", "train", f"--run-dir={run_dir}", *QUICK, *flags]
    done = subprocess.run(
        command, cwd=project, env=clean_environment(project), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "leak" not in done.stderr  # of what torch has not freed at the end
    facts = json.loads((run_dir / "provenance.json").read_text())
    return json.loads((run_dir / "summary.json").read_text()), facts["packages"]["torch"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("pythons", [(OTHER, sys.executable), (sys.executable, OTHER)])
def test_a_run_goes_on_with_another_torch(
    pythons: tuple[str, str], strategy: str, project: Path, tmp_path: Path
) -> None:
    """With its optimizer and averages, from the other's checkpoint."""
    flags = (f"--strategy={strategy}", "--ema=0.9", "--checkpoint-every=5")
    _, first = train(pythons[0], project, tmp_path / "run", *flags, "--max-steps=5")
    summary, then = train(pythons[1], project, tmp_path / "run", *flags, "--max-steps=10")
    assert first != then
    assert (summary["resumed_from_step"], summary["global_step"]) == (5, 10)
