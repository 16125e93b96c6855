"""Lists runs with their status: `python -m <package> runs [FOLDER...] [--fail]`.

In a project with the tool `report`, `runs RUN_DIR` shows all about one run, and
`runs RUN_DIR RUN_DIR` also how two runs differ.
"""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from ..engine.config import read_flags
from ..engine.errors import printable
from . import optional, program
from .survey import Run, recent
from .text import aligned, duration, local_time, write

TROUBLE = ("failed", "stuck", "lost")


@dataclasses.dataclass(frozen=True)
class Flags:
    """Show the status of runs, newest first. A run is stuck if it has written nothing for too long.
    It is lost if its job has left Slurm before the run wrote how it ended."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """folders of runs, of experiments or of all experiments; default: run_root of the settings.
    With the tool report, one run folder shows all about the run, and two also how they differ"""
    hours: float = math.inf
    """show only runs that wrote something in the last HOURS hours"""
    fail: bool = False
    """exit with code 1 if one of the runs failed, is stuck or is lost"""
    json: Path | None = None
    """file to write with the status of the runs as JSON"""


def main(argv: Sequence[str]) -> int:
    """Print a line for each run; return 1 if `--fail` is set and a run needs attention, else 0.

    Raises:
        UsageError: a folder does not exist.
    """
    flags = read_flags(Flags, argv, program("runs"))
    now = time.time()
    folders, runs = recent(flags.folders, flags.hours, now)
    lines = _shown(folders, runs, now) if runs else [f"no runs in {', '.join(map(str, folders))}"]
    print("\n".join(lines))
    if flags.json:
        write(flags.json, f"{json.dumps([run.facts for run in runs], indent=2)}\n")
    return 1 if flags.fail and any(run.status in TROUBLE for run in runs) else 0


def _shown(folders: Sequence[Path], runs: Sequence[Run], now: float) -> list[str]:
    """Return all about the run whose folder is given, else a table, and how two runs differ."""
    facts: Any = optional("tools.facts")
    if not facts or {folder.resolve() for folder in folders} != {
        run.folder.resolve() for run in runs
    }:
        return [table(runs, now)]
    if len(runs) == 1:
        return facts.screen(facts.about(runs[0]))
    more = ["", *facts.differences(*folders)] if len(folders) == 2 else []
    return [table(runs, now), *more]


def table(runs: Sequence[Run], now: float) -> str:
    """Return the runs as text in columns. The flags and the note of a run are on separate lines."""
    header = "run", "status", "start", "step", "done", "last heard", "best score", "job", "commit"
    rows: list[tuple[str, ...]] = [header]
    for run in runs:
        state, score = run.state, run.state.get("best_score")
        metric = str(state.get("best_metric")).removeprefix("validation/")
        rows.append(
            (
                str(run.folder),
                run.status,
                local_time(state["started"]) if "started" in state else "",
                str(state.get("step", "")),
                f"{state['progress']:.0%}" if "progress" in state else "",
                f"{duration(now - state['updated'])} ago",
                "" if score is None else f"{metric} {score:.4g}",
                state["job"] or "",
                run.commit,
            )
        )
    lines = aligned(rows)
    for number, run in enumerate(runs, 1):
        notes = (run.flags, run.note, *map(str, run.state.get("warnings", [])))
        lines[number] += "".join(f"\n    {printable(text)}" for text in notes if text)
    return "\n".join(lines)
