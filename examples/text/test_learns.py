"""The network learns from the synthetic text."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path


def test_it_learns(start: Callable[..., list[subprocess.Popen]], tmp_path: Path) -> None:
    (training,) = start(1, "--max-steps=60", "--validate-every=0")
    assert training.wait(timeout=5 * 60) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test_perplexity"] < 14  # from the frequencies of letters alone: 18
