"""The command report writes a page about a run as one file."""

import subprocess
from collections.abc import Callable
from pathlib import Path


def test_a_page_about_a_run(start: Callable[..., list[subprocess.Popen]], tmp_path: Path) -> None:
    (trained,) = start(1, "--trackers=none", "--log-every=10")
    assert trained.wait(timeout=5 * 60) == 0
    page = tmp_path / "report.html"
    (report,) = start(1, f"{tmp_path}/run", f"--output={page}", command="report")
    assert report.wait(timeout=60) == 0
    text = page.read_text(encoding="utf-8")
    assert "finished" in text and "data:image/png" in text and len(text) < 1_000_000
