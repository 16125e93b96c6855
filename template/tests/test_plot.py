"""The commands plot and runs show a run without a server."""

import subprocess
from collections.abc import Callable
from pathlib import Path


def test_a_run_is_drawn_and_listed(
    start: Callable[..., list[subprocess.Popen]], tmp_path: Path
) -> None:
    (trained,) = start(1, "--trackers=none", "--log-every=10")
    assert trained.wait(timeout=5 * 60) == 0
    picture = tmp_path / "curves.png"
    (plot,) = start(1, f"{tmp_path}/run", f"--output={picture}", command="plot")
    (runs,) = start(1, f"{tmp_path}/run", "--fail", command="runs")
    assert (plot.wait(timeout=60), runs.wait(timeout=60)) == (0, 0)
    assert picture.read_bytes().startswith(b"\x89PNG")
