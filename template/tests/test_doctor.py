"""The command doctor finds no error on this machine."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


def test_two_nodes_find_all_well(
    start: Callable[..., list[subprocess.Popen]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # without Slurm's commands, doctor leaves out Slurm's answers
    flags = ["--dataset=synthetic", "--device=cpu", "--trackers=none"]
    flags += [f"--run-root={tmp_path}/runs"]
    said = tmp_path / "said.txt"
    with said.open("w") as out:
        pipes = {"stdin": subprocess.PIPE, "stdout": out}
        (first,) = start(1, "--nodes=compare", *flags, command="doctor", **pipes)
    assert first.stdin
    nodes = start(2, "--nodes=report", *flags, command="doctor", stdout=first.stdin)
    first.stdin.close()
    assert [each.wait(timeout=5 * 60) for each in (*nodes, first)] == [0, 0, 0]
    text = said.read_text()
    for name in ("python", "packages", "torch", "dataset", "run folder", "shared folder"):
        assert f"\nok       {name:12} " in f"\n{text}"
    assert text.endswith("\n0 error(s), 0 warning(s)\n")
