"""Training runs on this machine: on two ranks, and across a stop."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Start = Callable[..., list[subprocess.Popen]]
MINUTES = 5 * 60


def wait(processes: list[subprocess.Popen]) -> list[int]:
    """Return the ranks' exit codes."""
    return [process.wait(timeout=MINUTES) for process in processes]


def summary(folder: Path) -> dict[str, Any]:
    """Return the run's summary.json."""
    return json.loads((folder / "run" / "summary.json").read_text())


def test_two_ranks_stop_and_go_on_bit_for_bit(start: Start, tmp_path: Path) -> None:
    assert wait(start(2)) == [0, 0]
    whole = summary(tmp_path)
    assert (whole["world_size"], whole["global_step"]) == (2, 40)
    (tmp_path / "run").rename(tmp_path / "whole")

    ranks = start(2)
    while not list((tmp_path / "run" / "checkpoints").glob("step-*10.pt")):
        assert ranks[0].poll() is None, "rank 0 ended before its first checkpoint"
        time.sleep(0.01)
    ranks[1].send_signal(signal.SIGTERM)
    stopped = wait(ranks)
    assert stopped in ([75, 75], [0, 0])  # on a fast machine, it may have finished before
    assert wait(start(2)) == [0, 0]
    assert summary(tmp_path)["parameters_sha256"] == whole["parameters_sha256"]
