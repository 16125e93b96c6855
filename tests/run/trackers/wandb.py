"""Reads the offline files of Weights & Biases with its own command."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import Shown, by_step

Records = dict[str, list[Any]]
"""The records of an attempt, by kind."""


KEY = "WANDB_API_KEY"  # without it, `sync` sends nothing


def places(run_dir: Path) -> list[Path]:
    """Return what W&B makes for a run."""
    return [run_dir / "wandb"]


def attempts(run_dir: Path) -> list[Records]:
    """Return the records that each attempt of a run left for `wandb sync`."""
    found = []
    # An attempt that was killed at its start left a folder without records.
    for file in sorted(run_dir.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file.parent)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        records: Records = {}
        for line in done.stdout.splitlines():
            if line.startswith("{"):
                record = json.loads(line)
                records.setdefault(record["type"], []).append(record[record["type"]])
        found.append(records)
    return found


def runs(store: Path) -> list[Shown]:
    """Return what W&B would show of the runs in a store."""
    return [shown(folder.parent) for folder in store.glob("*/wandb")]


def shown(run_dir: Path) -> Shown:
    """Return what W&B would show of a run: it joins the attempts, which have the same id."""
    found = attempts(run_dir)
    about = [each["run"][0] for each in found if "run" in each]
    assert len({each["run_id"] for each in about}) == 1
    update = about[-1]["config"]["update"]
    summary: dict[str, Any] = {}
    for each in found[-1].get("summary", ()):
        summary |= each.get("update", {})
    numbers: dict[str, list[tuple[int, float]]] = {}
    media: dict[str, dict[str, list[tuple[int, dict[str, Any]]]]] = {}  # by kind and name
    for row in (row["item"] for each in found for row in each.get("history", ())):
        names = {name.removesuffix("._type") for name in row if name.endswith("._type")}
        for name in names:
            facts = {key.removeprefix(f"{name}."): row[key] for key in row}
            each = media.setdefault(facts["_type"], {}).setdefault(name, [])
            each.append((row["trainer/step"], facts))
        if not names:
            for name in row.keys() - {"_step", "_runtime", "_timestamp", "trainer/step"}:
                number = float(row[name])  # JSON has NaN as a text
                numbers.setdefault(name, []).append((row["trainer/step"], number))
    files = {path.stem: path for path in sorted(run_dir.glob("wandb/offline-run-*/files/*.txt"))}
    return Shown(
        name=about[-1]["display_name"],
        experiment=about[-1]["run_group"],
        tags=about[-1].get("tags", ()),
        settings=update,
        provenance=update["provenance"],
        status=summary.get("status"),
        error=summary.get("error"),
        numbers={name: by_step(name, pairs) for name, pairs in numbers.items()},
        images={
            name: by_step(name, [(step, (each["width"], each["height"])) for step, each in pairs])
            for name, pairs in media.get("image-file", {}).items()
        },
        histograms={
            name: by_step(name, [(step, sum(each["values"])) for step, each in pairs])
            for name, pairs in media.get("histogram", {}).items()
        },
        tables={
            name: [*by_step(name, pairs)] for name, pairs in media.get("table-file", {}).items()
        },
        texts={name: path.read_text() for name, path in files.items()},
        keeps=True,
    )
