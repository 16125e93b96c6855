"""What of a run's metrics is the same each time."""

from collections.abc import Iterable, Mapping
from typing import Any


def reproducible(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what depends on the machine's speed."""
    return [{name: value for name, value in line.items() if not measured(name)} for line in lines]


def measured(name: str) -> bool:
    """Return whether a metric depends on the machine's speed."""
    beginnings = ("time", "system/", "train/data_seconds")
    return name.startswith(beginnings) or name.endswith("_per_second")
