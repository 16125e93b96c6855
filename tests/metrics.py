"""Reads the metrics of a run that may still be training."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read(run_dir: Path) -> list[dict[str, float]]:
    """Return the complete lines of metrics.jsonl."""
    return [json.loads(line) for line in _whole_lines(run_dir)]


def series(run_dir: Path) -> dict[str, dict[int, float]]:
    """Return the values of each metric, by step."""
    found: dict[str, dict[int, float]] = {}
    for line in read(run_dir):
        for name in line.keys() - {"step", "time"}:
            found.setdefault(name, {})[int(line["step"])] = line[name]
    return found


def last_step(run_dir: Path) -> int:
    """Return the last step that was logged, or 0.

    Tests call this often, so it parses only one line as JSON.
    """
    lines = _whole_lines(run_dir)
    return json.loads(lines[-1])["step"] if lines else 0


def logged(run_dir: Path, step: int) -> bool:
    """Return whether the run has logged a step."""
    return last_step(run_dir) >= step


def _whole_lines(run_dir: Path) -> list[str]:
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line[-1] == "\n"]


def reproducible(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return lines of metrics.jsonl without the metrics that depend on the machine's speed."""
    return [{name: value for name, value in line.items() if not measured(name)} for line in lines]


def measured(name: str) -> bool:
    """Return whether a metric depends on the machine's speed."""
    beginnings = ("time", "system/", "train/data_seconds", "train/slowest_hook_seconds")
    return name.startswith(beginnings) or name.endswith("_per_second")
