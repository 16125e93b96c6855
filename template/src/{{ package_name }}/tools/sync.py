"""Send to the trackers what they missed: because they were off, out of reach, or offline.

    python -m <package> sync RUN_DIR...

The run folder has everything: metrics.jsonl, figures, the log. What a tracker has already is not
sent again.
"""

import dataclasses
import json
import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..engine.config import read_flags
from ..engine.errors import UsageError
from ..engine.filesystem import open_regular, read_lines, read_object, write_atomically
from ..engine.run.run_lock import owner_of
from ..engine.run.status import KINDS
from ..settings import Settings
from ..trackers import Backend, load, select
from . import program
from .runs import find_runs

log = logging.getLogger(__name__)

MOST_PIXELS = 2**25  # of a figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Send to the trackers what they missed of some runs; run this where the trackers are in reach.

    Nothing is sent twice, so it does no harm to try again.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """run folders, or folders of an experiment, which stand for all runs in them"""
    trackers: tuple[str, ...] = ()
    """trackers to send to; else those that the run was started with"""


def main(argv: Sequence[str]) -> int:
    """Send what is missing; return 0, or 1 if a tracker failed.

    Raises:
        UsageError: a folder holds no run, or a tracker is unknown.
    """
    flags = read_flags(Flags, argv, program("sync"))
    select(flags.trackers)
    directories = find_runs(flags.runs)
    if not directories:
        named = " ".join(map(str, flags.runs))
        raise UsageError(
            f"no run in {named}: name one, such as runs/demo/7"
            if named
            else "no run is named: name its folder, such as runs/demo/7"
        )
    return max(_sync_one(directory, flags.trackers) for directory in directories)


def _sync_one(directory: Path, names: Sequence[str]) -> int:
    """Send what trackers lack of one run; a run that can't be read ends no other one's turn."""
    try:
        return sync(directory, names)
    except OSError as error:
        log.error("can't read %s: %s", error.filename or directory, error.strerror)
    except UsageError as error:
        log.error("%s", error)
    return 1


def sync(directory: Path, names: Sequence[str]) -> int:
    """Send what trackers lack of one run; return 1 if one of them failed."""
    from ..engine.checkpoint_files import Checkpoints
    from ..engine.errors import without_secrets
    from ..engine.run.description import describe_run
    from ..engine.run.logging_setup import read_log
    from ..trackers.dispatch import known_ids, note_id

    settings = dataclasses.replace(
        Settings.from_yaml(directory / "config.yaml"), run_dir=str(directory.absolute())
    )
    state, facts = read_json(directory / "status.json"), read_json(directory / "provenance.json")
    status = state.get("status", "running")
    if owner_of(directory):
        # Its trackers would be told twice, and at the same time.
        log.warning("%s trains right now, and sends by itself: sync it after its end", directory)
        return 0
    if status == "running":
        log.warning("%s has not ended, or was killed; what it has so far is sent", directory)
    lines = read_lines(directory / "metrics.jsonl")
    text, best = read_log(directory), Checkpoints(directory / "checkpoints").best()
    last = max((line["step"] for line in lines), default=0)
    failures = 0
    chosen = select(names or settings.trackers)
    if not chosen:
        log.warning("%s was started without a tracker: name some with --trackers", directory)
    for name in chosen:
        run_id = known_ids(directory, 0).get(name)
        incomplete = status == "running" or not run_id or name in state.get("missed_by", ())
        try:
            module = load(name)
            if hasattr(module, "sync") and module.sync(directory):
                continue
            if not incomplete:
                log.info("%s: %s has it all", directory, name)
                continue
            run = dataclasses.replace(describe_run(settings, facts, last), run_id=run_id)
            if any((directory.absolute().parent / each).exists() for each in (".aim", "mlflow.db")):
                # The experiment may have been moved since.
                run = dataclasses.replace(run, store=directory.absolute().parent)
            backend = module.Tracker(run)
            note_id(directory, 0, name, backend.run_id)
            count = fill(backend, run.run_id is not None, lines)
            show_figures(backend, directory / "figures")
            backend.log_text("log", text, last)
            if best:
                backend.log_checkpoint(best, last)
            # Of a run that was killed nobody knows better.
            backend.finish("failed" if status == "running" else status, state.get("error"))
            log.info("%s: %s lacked %d numbers, and has it all now", directory, name, count)
        except Exception as error:
            log.error(
                "%s: %s did not take it: %s",
                directory,
                name,
                without_secrets(f"{type(error).__name__}: {error}").splitlines()[0],
            )
            failures = 1
            continue
        if name in state.get("missed_by", ()):
            state["missed_by"].remove(name)
            write_atomically(directory / "status.json", json.dumps(state, indent=2) + "\n")
    return failures


def read_json(path: Path) -> dict[str, Any]:
    """Return what a file holds, nothing if it is not there or damaged.

    Raises:
        OSError: it can't be read.
    """
    try:
        return read_object(path, KINDS if path.name == "status.json" else {})
    except (FileNotFoundError, ValueError):
        return {}


def fill(backend: Backend, known: bool, lines: Sequence[dict[str, Any]]) -> int:
    """Log the numbers that a tracker lacks; return how many."""
    held = backend.history() if known else {}
    count = 0
    for line in lines:
        step, time = line["step"], line.get("time", 0.0)
        missing = {
            name: value
            for name, value in line.items()
            if name not in ("step", "time") and step not in held.get(name, ())
        }
        if missing:
            backend.log_metrics(missing, step, time)
            count += len(missing)
    return count


def show_figures(backend: Backend, folder: Path) -> None:
    """Log the pictures of a run; what is none is left out."""
    import numpy as np
    from PIL import Image

    if folder.is_symlink():
        log.warning("%s is left out: it is a link", folder)
        return
    for path in sorted(folder.glob("*.png")):
        if found := re.fullmatch(r"(\w+)-(\w+)-(\d+)", path.stem):
            try:
                with open_regular(path) as file, Image.open(file, formats=["PNG"]) as picture:
                    if math.prod(picture.size) > MOST_PIXELS:
                        raise ValueError("too large")
                    image = np.asarray(picture.convert("RGB"))
            except (SyntaxError, ValueError, OSError, Image.DecompressionBombError) as error:
                log.warning("%s is left out: %s", path, error)
                continue
            backend.log_image(f"{found[1]}/{found[2]}", image, int(found[3]))
