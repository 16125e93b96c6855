"""Every tracker of this project keeps what is logged to it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


def test_what_is_logged_is_read_back(
    start: Callable[..., list[subprocess.Popen]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of files alone: a server, or an account, would keep what is only a test.
    for name in ("MLFLOW_TRACKING_URI", "AIM_REPO", "TRACKIO_DIR", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    (check,) = start(1, f"--run-root={tmp_path}", command="check-trackers")
    assert check.wait(timeout=5 * 60) == 0
