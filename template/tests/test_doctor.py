"""The check of what a job needs finds all well on this machine."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


def test_two_nodes_find_all_well(
    start: Callable[..., list[subprocess.Popen]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # without Slurm's commands, doctor leaves out Slurm's answers
    report = tmp_path / "report.json"
    flags = ["--dataset=synthetic", "--device=cpu", "--trackers=none", f"--json={report}"]
    flags += [f"--run-root={tmp_path}/runs"]
    (first,) = start(1, "--nodes=compare", *flags, command="doctor", stdin=subprocess.PIPE)
    assert first.stdin
    nodes = start(2, "--nodes=report", *flags, command="doctor", stdout=first.stdin)
    first.stdin.close()
    assert [each.wait(timeout=5 * 60) for each in (*nodes, first)] == [0, 0, 0]
    found = json.loads(report.read_text())["findings"]
    well = {finding["name"] for finding in found if finding["status"] == "ok"}
    assert {"python", "packages", "torch", "dataset", "run folder", "shared folder"} <= well
