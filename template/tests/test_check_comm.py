"""Two ranks on this machine communicate."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path


def test_two_ranks_understand_each_other(
    start: Callable[..., list[subprocess.Popen]], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    flags = ("--device=cpu", "--max-bytes=20000", "--pairs", f"--json={report}")
    ranks = start(2, *flags, command="check-comm")
    assert [rank.wait(timeout=5 * 60) for rank in ranks] == [0, 0]
    found = json.loads(report.read_text())
    assert (found["backend"], len(found["hosts"])) == ("gloo", 2)
    assert all(row["bus_gb_s"] > 0 for row in found["speed"])
    assert [pair["ranks"] for pair in found["pairs"]] == [[0, 1]]
