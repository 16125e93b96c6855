"""The check of what a job needs finds all well on this machine."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


def test_two_processes_find_all_well(
    start: Callable[..., list[subprocess.Popen]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # without Slurm's commands, what the cluster says is left out
    report = tmp_path / "report.json"
    flags = ("--dataset=synthetic", "--device=cpu", "--trackers=none", f"--json={report}")
    processes = start(2, *flags, f"--run-root={tmp_path}/runs", command="doctor")
    assert [process.wait(timeout=5 * 60) for process in processes] == [0, 0]
    found = json.loads(report.read_text())["findings"]
    well = {finding["name"] for finding in found if finding["status"] == "ok"}
    assert {"python", "packages", "torch", "dataset", "run folder", "shared folder"} <= well
