"""Says all about one run on one screen, and how two runs differ, for the command `runs`."""

import difflib
import os
import re
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, get_type_hints

from ..engine.errors import printable
from ..engine.foreign import read_bytes, read_object
from ..engine.run.run_lock import Attempt, newest
from ..settings import Settings
from . import optional
from .survey import Run, commit_of, disk_usage, read, read_settings
from .text import aligned, as_text, duration, local_time

usage, said = map(optional, ("plugins.usage.costs", "plugins.usage.lines"))
WIDTH = 106  # characters of the second column
MOST_ATTEMPTS = 5
APART = ("hostnames", "usage")  # keys of summary.json that have lines of their own
MOST_LINES = 2000  # upper limit of lines of uncommitted changes that are compared


def about(run: Run) -> dict[str, list[str]]:
    """Return the facts about a run: lines of text by their subject."""
    folder, state = run.folder, run.state
    facts, given = read(folder / "provenance.json"), read_settings(folder)
    silence = f"last heard {duration(time.time() - state['updated'])} ago"
    score = state.get("best_score")
    best = f"{state.get('best_metric')} {as_text(score)} at step {state.get('best_step')}"
    defaults = Settings().as_dict() | {name: given.get(name) for name in ("run_dir", "ranks")}
    made, results = _described(folder), read(folder / "summary.json")
    cost = usage.total(folder) if usage else None
    return {
        "run": [str(folder.resolve())],
        "status": ["; ".join(filter(None, (run.status, silence, run.note)))],
        "warnings": [str(each) for each in state.get("warnings", [])],
        "step": [f"{state.get('step', '?')}, {state.get('progress', 0):.0%}"],
        "best": ["none" if score is None else best],
        "results": [_joined({n: v for n, v in results.items() if n not in APART})],
        "usage": said.lines(cost, run.status == "finished") if said and cost else [],
        "attempts": list(_attempts(folder)),
        "settings": [_joined({n: v for n, v in given.items() if v != defaults.get(n)})],
        "commit": [made["commit"].replace("+", " with uncommitted changes")],
        "code": [f"code/{facts['snapshot']}.tar.gz" if facts.get("snapshot") else ""],
        "command": [" ".join(map(str, facts.get("command", [])[1:]))],
        "nodes": [f"{made['nodes']}; world size {facts.get('world_size')}, {made['launcher']}"],
        "versions": [f"Python {made['python']}, torch {made.get('package torch')}"],
        "checkpoints": [_checkpoints(folder / "checkpoints")],
        "trackers": [_joined(read(folder / "trackers.json"))],
        "files": [f"{disk_usage(folder) / 2**20:.1f} MiB: {'  '.join(sorted(os.listdir(folder)))}"],
    }


def screen(sections: Mapping[str, Sequence[str]]) -> list[str]:
    """Return at most 40 lines of two columns."""
    lines = []
    for name, texts in sections.items():
        for each in filter(None, texts):  # from files that may have any content
            wrapped = textwrap.wrap(printable(each[:1000]), WIDTH, break_on_hyphens=False)
            lines += [f"{name:13}{wrapped[0]}", *(f"{'':13}{line}" for line in wrapped[1:3])]
            name = ""
    return lines[:40]


def _attempts(run: Path) -> Iterator[str]:
    """Yield a line for each of the newest starts, the newest first."""
    folder, costs = run / "attempts", usage.read(run) if usage else {}
    last = newest(folder)
    for number in range(last, max(last - MOST_ATTEMPTS, 0), -1):
        path = folder / f"{number}.json"
        with suppress(OSError, ValueError, TypeError):
            attempt = Attempt(**read_object(path, get_type_hints(Attempt)))
            end = path.stat().st_mtime
            seconds = end - attempt.began if attempt.began else 0
            if number in costs:  # more reliable: a copied file has another time
                seconds = costs[number].wall_seconds
            span = f" for {duration(seconds)}" if seconds else ""
            yield f"{number}: {local_time(attempt.began or end)}{span}, {attempt}"[:WIDTH]
    if last > MOST_ATTEMPTS:
        yield f"and {last - MOST_ATTEMPTS} earlier"


def _checkpoints(folder: Path) -> str:
    """Return the steps of the checkpoints, with a mark at the best one, and their total size."""
    names = sorted(x.name for x in folder.glob("*.pt") if re.fullmatch(r"step-\d+\.pt", x.name))
    best = ""
    with suppress(OSError):
        best = read_bytes(folder / "best").decode(errors="replace").strip()
    steps = [name[5:-3].lstrip("0") + (" (best)" if name == best else "") for name in names]
    return f"{', '.join(steps) or 'none'}; {disk_usage(folder) / 2**20:.1f} MiB"


def differences(*folders: Path) -> list[str]:
    """Return a table of the differences between two runs, and some lines of their changed code."""
    first, second = map(_described, folders)
    diffs = [str(run.pop("diff")).splitlines()[:MOST_LINES] for run in (first, second)]
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    rows = [(name, *(as_text(run.get(name, "-")) for run in (first, second))) for name in names]
    lines = aligned([("", *map(str, folders)), *rows], widest=48) if rows else []
    changed = difflib.unified_diff(diffs[0], diffs[1], "first", "second", n=0, lineterm="")
    if some := [f"    {printable(line)[:100]}" for line in islice(changed, 12)]:
        lines += ["the uncommitted changes differ:", *some]
    return lines or ["no difference"]


def _described(folder: Path) -> dict[str, Any]:
    """Return settings, results, code and nodes of a run by name."""
    facts, summary = read(folder / "provenance.json"), read(folder / "summary.json")
    settings = {n: v for n, v in read_settings(folder).items() if n != "run_dir"}
    return {
        **{f"setting {name}": value for name, value in settings.items()},
        **{f"summary {name}": summary[name] for name in summary if name not in APART},
        **{f"package {name}": version for name, version in facts.get("packages", {}).items()},
        "commit": commit_of(facts),
        "diff": facts.get("git", {}).get("diff") or "",
        "python": facts.get("python", {}).get("version"),
        "launcher": facts.get("launcher"),
        "nodes": " ".join(map(str, facts.get("hostnames", []))),
    }


def _joined(values: Mapping[str, Any]) -> str:
    return "  ".join(f"{name}={as_text(value)}" for name, value in values.items())
