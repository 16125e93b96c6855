"""Reads the lines at the top of each preset in sites/, and the records of their sites."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path

from renderer import QUESTIONS, TEMPLATE

from scripts import site_record

# The address of a page, with or without https://.
ADDRESS = re.compile(r"(?:https://)?(?:[\w-]+\.)+[a-z]{2,}/[\w./?=&-]+")
LONG_AGO = timedelta(days=365)
VERSIONS = {
    "torch": "torch",
    "cuda": "CUDA",
    "hip": "HIP",
    "nccl": "NCCL",
    "driver": "driver",
    "slurm": "Slurm",
}


@dataclass(frozen=True)
class Preset:
    """A file of answers for a site.

    Attributes:
        name: name of its file, without .yml.
        about: the machine that it is for.
        sources: addresses of the pages that it was made from.
        compared: the day on which somebody last compared it with these pages.
        left: the questions that it leaves to its user, in the order of its comment.
        unusual: what is unusual at this site; may be empty.
    """

    name: str
    about: str
    sources: tuple[str, ...]
    compared: date
    left: tuple[str, ...]
    unusual: str = ""

    @classmethod
    def read(cls, file: Path) -> "Preset":
        """Return the preset in a file.

        Raises:
            ValueError: it does not name its pages, or the day of the last comparison.
        """
        comment = " ".join(re.findall(r"^# ?(.*)$", file.read_text("utf-8"), re.MULTILINE))
        head = re.match(r"(.+?)\. From (.*?)\bcompared on (\d{4}-\d\d-\d\d)\. ", comment)
        if not head or not (sources := tuple(ADDRESS.findall(head[2]))):
            expected = "MACHINE. From PAGE (ADDRESS), compared on YYYY-MM-DD."
            raise ValueError(f"{file.name}: its first lines are not {expected!r}")
        unusual = re.search(r"Unusual: (.+)\.$", comment)
        _, _, rest = re.sub(r" \(.+?\)", "", comment).partition("To be answered: ")
        left = tuple(re.findall(rf"\b(?:{'|'.join(QUESTIONS)})\b", rest.partition(". ")[0]))
        day = date.fromisoformat(head[3])
        return cls(file.stem, head[1], sources, day, left, unusual[1] if unusual else "")


def read_all() -> list[Preset]:
    """Return the presets, by name."""
    return [Preset.read(file) for file in sorted(TEMPLATE.glob("sites/*.yml"))]


def not_compared_for_a_year(presets: Iterable[Preset], today: date) -> list[str]:
    """Return the names of the presets that nobody has compared with their pages for a year."""
    return [preset.name for preset in presets if today - preset.compared > LONG_AGO]


def ran(file: Path) -> str:
    """Return what the table of sites says about a record, "never" if there is none."""
    if not file.exists():
        return "never"
    record = site_record.read(file)
    results = [each["result"] for each in record["checks"]]
    words = [f"{record['date']}: {results.count('pass')} of {len(results)} checks passed"]
    gpus = f"{record.get('gpus_per_node')} × {record.get('gpu', 'unknown GPU')} a node"
    words += [gpus if "gpus_per_node" in record else "no GPU"]
    words += [f"{shown} {record[name]}" for name, shown in VERSIONS.items() if name in record]
    return ", ".join(words)
