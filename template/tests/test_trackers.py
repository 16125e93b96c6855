"""Each tracker of this project stores what is logged to it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


def test_what_is_logged_is_read_back(
    start: Callable[..., list[subprocess.Popen]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Use only local files: a server or an account would keep the test's runs.
    for name in ("MLFLOW_TRACKING_URI", "AIM_REPO", "TRACKIO_DIR", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    (check,) = start(1, f"--run-root={tmp_path}", command="check-trackers")
    assert check.wait(timeout=5 * 60) == 0
