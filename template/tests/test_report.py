"""The commands report and runs show a run without a server."""

import subprocess
from collections.abc import Callable
from pathlib import Path


def test_a_run_is_reported_drawn_and_listed(
    start: Callable[..., list[subprocess.Popen]], tmp_path: Path
) -> None:
    (trained,) = start(1, "--trackers=none", "--log-every=10")
    assert trained.wait(timeout=5 * 60) == 0
    page, picture = tmp_path / "report.html", tmp_path / "curves.png"
    shown = [
        *start(1, f"{tmp_path}/run", f"--output={page}", command="report"),
        *start(1, f"{tmp_path}/run", f"--output={picture}", command="report"),
        *start(1, f"{tmp_path}/run", "--fail", command="runs"),
    ]
    assert [each.wait(timeout=60) for each in shown] == [0, 0, 0]
    text = page.read_text(encoding="utf-8")
    assert "finished" in text and "data:image/png" in text and len(text) < 1_000_000
    assert picture.read_bytes().startswith(b"\x89PNG")
