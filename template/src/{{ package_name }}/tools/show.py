"""Tells everything about one run on a screen: `python -m <package> show RUN_DIR`."""

import dataclasses
import os
import re
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tyro

from ..engine.config import read_flags
from ..engine.errors import UsageError, printable
from ..engine.filesystem import disk_usage, read_bytes
from ..engine.run.run_lock import Attempt, newest
from ..settings import Settings
from . import program
from .facts import commit_of, read, read_settings, size_text, text
from .runs import MARKS, duration, local_time, survey

WIDTH = 106  # of the second column
MOST_ATTEMPTS = 5
ELSEWHERE = ("hostnames", "world_size", "global_step")  # of summary.json; other lines have them


@dataclasses.dataclass(frozen=True)
class Flags:
    """Show everything about one run: status, results, starts, settings, code, files."""

    run: tyro.conf.Positional[Path]
    """run folder"""


def main(argv: Sequence[str]) -> int:
    """Print at most 40 lines about a run; return 0.

    Raises:
        UsageError: the folder is not that of a run.
    """
    folder = read_flags(Flags, argv, program("show")).run
    if not any((folder / mark).exists() for mark in MARKS):
        raise UsageError(f"{folder} is not the folder of a run: `runs {folder}` lists those in it")
    sections = {
        "run": [str(folder.resolve())],
        **_progress(folder),
        "attempts": list(_attempts(folder / "attempts")),
        **_origin(read(folder / "provenance.json"), read_settings(folder)),
        "checkpoints": [_checkpoints(folder / "checkpoints")],
        "trackers": [_joined(read(folder / "trackers.json"))],
        "files": [f"{size_text(disk_usage(folder))}: {'  '.join(sorted(os.listdir(folder)))}"],
    }
    lines = []
    for name, texts in sections.items():
        for each in filter(None, texts):  # of a foreign file, and of any length
            wrapped = textwrap.wrap(printable(each[:1000]), WIDTH, break_on_hyphens=False)
            lines += [f"{name:13}{wrapped[0]}", *(f"{'':13}{line}" for line in wrapped[1:3])]
            name = ""
    print("\n".join(lines[:40]))
    return 0


def _joined(values: Mapping[str, Any]) -> str:
    return "  ".join(f"{name}={text(value)}" for name, value in values.items())


def _progress(folder: Path) -> dict[str, list[str]]:
    """Return status, progress and results."""
    now = time.time()
    (run,) = survey([folder], now)
    state, summary = run.state, read(folder / "summary.json")
    silence = f"last heard {duration(now - state['updated'])} ago"
    score = f"{state.get('best_metric')} {text(state.get('best_score'))}"
    best = (
        f"{score} at step {state.get('best_step')}"
        if state.get("best_score") is not None
        else "none"
    )
    return {
        "status": ["; ".join(filter(None, (run.status, silence, run.note)))],
        "step": [f"{state.get('step', '?')}, {state.get('progress', 0):.0%}"],
        "best": [best],
        "results": [_joined({n: v for n, v in summary.items() if n not in ELSEWHERE})],
    }


def _attempts(folder: Path) -> Iterator[str]:
    """Yield a line for each of the newest starts, the last one first."""
    last = newest(folder)
    for number in range(last, max(last - MOST_ATTEMPTS, 0), -1):
        path = folder / f"{number}.json"
        with suppress(OSError, TypeError):
            attempt, end = Attempt(**read(path)), path.stat().st_mtime
            span = f" for {duration(end - attempt.began)}" if attempt.began else ""
            yield f"{number}: {local_time(attempt.began or end)}{span}, {attempt}"[:WIDTH]
    if last > MOST_ATTEMPTS:
        yield f"and {last - MOST_ATTEMPTS} earlier"


def _origin(facts: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return where the run came from: changed settings, code, command, machines, versions."""
    defaults = Settings().as_dict() | {"run_dir": settings.get("run_dir")}
    changed = {n: v for n, v in settings.items() if v != defaults.get(n, v)}
    commit, nodes = commit_of(facts), " ".join(map(str, facts.get("hostnames", [])))
    torch = facts.get("packages", {}).get("torch")
    return {
        "settings": [_joined(changed)],
        "commit": [commit.replace("+", " with uncommitted changes")],
        "command": [" ".join(map(str, facts.get("command", [])[1:]))],
        "nodes": [f"{nodes}; world size {facts.get('world_size')}, {facts.get('launcher')}"],
        "versions": [f"Python {facts.get('python', {}).get('version')}, torch {torch}"],
    }


def _checkpoints(folder: Path) -> str:
    """Return the steps of the checkpoints, which one is the best, and their size."""
    names = sorted(x.name for x in folder.glob("*.pt") if re.fullmatch(r"step-\d+\.pt", x.name))
    best = ""
    with suppress(OSError):
        best = read_bytes(folder / "best").decode(errors="replace")
    steps = [name[5:-3].lstrip("0") + (" (best)" if name == best else "") for name in names]
    return f"{', '.join(steps) or 'none'}; {size_text(disk_usage(folder))}"
