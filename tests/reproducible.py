"""What of a run's metrics is the same each time."""

from collections.abc import Iterable, Mapping
from typing import Any

MEASURED = ("time", "system/", "train/images_per_second", "train/data_seconds")


def reproducible(lines: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what depends on the machine's speed."""
    return [
        {name: value for name, value in line.items() if not name.startswith(MEASURED)}
        for line in lines
    ]
