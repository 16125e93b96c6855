"""The network learns from the synthetic images."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path


def test_it_learns(start: Callable[..., list[subprocess.Popen]], tmp_path: Path) -> None:
    (training,) = start(1, "--max-steps=100")
    assert training.wait(timeout=5 * 60) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_accuracy"] > 0.5  # random guesses: 0.1
