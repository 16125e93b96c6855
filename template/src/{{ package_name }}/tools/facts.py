"""What the files of a run say of its settings, code and machines, and how two runs differ."""

import difflib
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from ..engine.config import read_yaml
from ..engine.errors import UsageError, printable
from ..engine.filesystem import read_object

KINDS = {"command": list, "git": dict, "hostnames": list, "packages": dict, "python": dict}
BATCH_FLAGS = ("--device", "--world-size", "--run-dir")  # the batch scripts give them
WIDEST = 48  # characters of a value in `difference`
MOST_LINES = 2000  # of uncommitted changes that are compared


def read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a run, such as provenance.json; {} if it can't be."""
    with suppress(OSError, ValueError):
        return read_object(path, KINDS)
    return {}


def read_settings(folder: Path) -> dict[str, Any]:
    """Return a run's settings and its number of ranks, as far as its folder has them."""
    settings: dict[str, Any] = {}
    with suppress(UsageError, ValueError, TypeError, KeyError):
        settings.update(read_yaml(folder / "config.yaml"))
        settings["ranks"] = read(folder / "provenance.json")["world_size"]
    return settings


def commit_of(facts: Mapping[str, Any]) -> str:
    """Return the commit in 8 characters, with a + if there were uncommitted changes."""
    git = facts.get("git", {})
    return str(git.get("commit") or "")[:8] + ("+" if git.get("changes") else "")


def flags_of(facts: Mapping[str, Any]) -> str:
    """Return the flags of the command line, without those that the batch scripts give."""
    words, kept = iter([str(word) for word in facts.get("command", [])][2:]), []
    for word in words:
        name, joined, _ = word.partition("=")
        if name.replace("_", "-") not in BATCH_FLAGS:
            kept.append(word)
        elif not joined:
            next(words, None)
    return shlex.join(kept)


def difference(folders: Sequence[Path]) -> list[str]:
    """Return lines of what differs between two runs; raise UsageError if a folder is of no run."""
    first, second = map(_describe, folders)
    diffs = [run.pop("diff").splitlines()[:MOST_LINES] for run in (first, second)]
    names = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    rows = [(name, *(text(run.get(name, "-")) for run in (first, second))) for name in names]
    lines = aligned([("", *map(str, folders)), *rows], WIDEST) if rows else []
    changed = difflib.unified_diff(diffs[0], diffs[1], "first", "second", n=0, lineterm="")
    if some := [f"    {printable(line)[:100]}" for line in islice(changed, 12)]:
        lines += ["the uncommitted changes differ:", *some]
    return lines


def _describe(folder: Path) -> dict[str, Any]:
    """Return what `difference` compares, by name."""
    facts, summary = read(folder / "provenance.json"), read(folder / "summary.json")
    if not facts:
        raise UsageError(f"can't read {folder}/provenance.json: name the folder of a run")
    return {
        **{f"setting {n}": v for n, v in read_settings(folder).items() if n != "run_dir"},
        **{f"summary {n}": v for n, v in summary.items() if n not in ("hostnames", "world_size")},
        "commit": commit_of(facts),
        "diff": str(facts.get("git", {}).get("diff") or ""),
        "python": facts.get("python", {}).get("version"),
        "nodes": " ".join(map(str, facts.get("hostnames", []))),
        "launcher": facts.get("launcher"),
        **{f"package {name}": version for name, version in facts.get("packages", {}).items()},
    }


def aligned(rows: Sequence[Sequence[str]], widest: int | None = None) -> list[str]:
    """Return rows of cells as lines, in columns; control characters are escaped."""
    cells = [[printable(cell)[:widest] for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def text(value: object) -> str:
    """Return a value as text, a float with six digits."""
    with suppress(ValueError):  # an integer of thousands of digits
        return f"{value:.6g}" if isinstance(value, float) else str(value)
    return "?"


def size_text(size: int) -> str:
    """Return a number of bytes in MiB, or in GiB from 1 GiB on."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
