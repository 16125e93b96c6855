"""A small sweep runs its trials and writes the best settings."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType


def test_a_sweep_trains_each_trial_in_a_folder_of_its_own(
    start: Callable[..., list[subprocess.Popen]],
    package: Callable[[str], ModuleType],
    tmp_path: Path,
) -> None:
    train = [sys.executable, "-m", package("settings").__package__, "train", "--trackers=none"]
    search = ["--trials=2", f"--run-root={tmp_path}", "--dataset=synthetic", "--device=cpu"]
    (sweep,) = start(1, *search, "--max-steps=10", "--", *train, command="sweep")
    assert sweep.wait(timeout=5 * 60) == 0
    for name in ("trial-0000", "trial-0001"):
        summary = json.loads((tmp_path / "sweep" / name / "summary.json").read_text())
        assert 0 < summary["best_step"] <= 10
    assert (tmp_path / "sweep" / "best.yaml").read_text().startswith("# The settings of trial-000")
    assert (tmp_path / "sweep" / "study.png").exists()
