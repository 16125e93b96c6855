"""Send to the trackers what they missed of runs: `python -m <package> sync RUN_DIR...`.

The run folder has everything: metrics.jsonl, figures, the log. Numbers that a tracker already has
are not sent again.
"""

import dataclasses
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from ..engine.config import read_flags
from ..engine.errors import UsageError, without_secrets
from ..engine.filesystem import open_regular, read_lines, read_object, write_atomically
from ..engine.run.description import describe_run
from ..engine.run.run_lock import owner_of
from ..engine.run.status import KINDS
from ..settings import Settings
from ..trackers import Backend, Run, load, select
from ..trackers.dispatch import known_ids, note_id
from . import program
from .runs import find_runs

log = logging.getLogger(__name__)

MOST_PIXELS = 2**25  # of a figure; another user may have written the file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Send to the trackers what they missed of some runs, from a machine that reaches them.

    Nothing is sent twice, so it does no harm to try again.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """folders of runs, or of experiments for all their runs"""
    trackers: tuple[str, ...] = ()
    """trackers to send to; else those that the run was started with"""


def main(argv: Sequence[str]) -> int:
    """Send what is missing; return 0, or 1 if a tracker failed or a run can't be read.

    Raises:
        UsageError: a folder holds no run, or a tracker is unknown.
    """
    flags = read_flags(Flags, argv, program("sync"))
    select(flags.trackers)
    folders = find_runs(flags.runs)
    if not folders:
        raise UsageError("there is no run to send: name a folder of runs, such as runs/demo/7")
    failures = 0
    for folder in folders:
        try:
            failures += sync(folder, flags.trackers)
        except (OSError, UsageError) as error:
            log.error("%s can't be read: %s", folder, getattr(error, "strerror", None) or error)
            failures += 1
    return int(failures > 0)


def sync(directory: Path, names: Sequence[str]) -> int:
    """Send to trackers what they lack of one run; return how many of them failed.

    Args:
        directory: the run folder.
        names: of the trackers; if none, those that the run was started with.

    Raises:
        OSError, UsageError: a file of the run can't be read; nothing was sent.
    """
    from ..engine.checkpoint_files import Checkpoints
    from ..engine.run.logging_setup import read_log

    if owner_of(directory):
        log.warning("%s trains right now, and sends by itself: sync it after its end", directory)
        return 0
    settings = dataclasses.replace(
        Settings.from_yaml(directory / "config.yaml"), run_dir=str(directory.absolute())
    )
    state, facts = read_json(directory / "status.json"), read_json(directory / "provenance.json")
    if state.get("status", "running") == "running":
        log.warning("%s has not ended, or was killed; what it has so far is sent", directory)
    lines, ids = read_lines(directory / "metrics.jsonl"), known_ids(directory, 0)
    text, best = read_log(directory), Checkpoints(directory / "checkpoints").best()
    run = describe_run(settings, facts, max((line["step"] for line in lines), default=0))
    beside = directory.absolute().parent
    if (beside / ".aim").exists() or (beside / "mlflow.db").exists():
        # Not the folder that the settings name: the experiment may have been moved.
        run = dataclasses.replace(run, store=beside)
    chosen = select(names or settings.trackers)
    if not chosen:
        log.warning("%s was started without a tracker: name some with --trackers", directory)
    failures = 0
    for name in chosen:
        try:
            _send(name, dataclasses.replace(run, run_id=ids.get(name)), state, lines, text, best)
        except Exception as error:
            reason = without_secrets(f"{type(error).__name__}: {error}").splitlines()[0]
            log.error("%s: %s did not take it: %s", directory, name, reason)
            failures += 1
            continue
        if name in state.get("missed_by", ()):
            state["missed_by"].remove(name)
            write_atomically(directory / "status.json", json.dumps(state, indent=2) + "\n")
    return failures


def _send(
    name: str,
    run: Run,
    state: Mapping[str, Any],
    lines: Sequence[dict[str, Any]],
    text: str,
    best: Path | None,
) -> None:
    """Send to one tracker what it lacks of a run: numbers, figures, the log, the checkpoint."""
    directory, last, status = run.directory, run.resume_step, state.get("status", "running")
    module = load(name)
    if hasattr(module, "sync") and module.sync(directory):
        return
    if status != "running" and run.run_id and name not in state.get("missed_by", ()):
        log.info("%s: %s has it all", directory, name)
        return
    backend = module.Tracker(run)
    note_id(directory, 0, name, backend.run_id)
    count = fill(backend, run.run_id is not None, lines)
    show_figures(backend, directory / "figures")
    backend.log_text("log", text, last)
    if best:
        backend.log_checkpoint(best, last)
    # A run that still has the status running was killed.
    backend.finish("failed" if status == "running" else status, state.get("error"))
    log.info("%s: %s lacked %d numbers, and has it all now", directory, name, count)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one if it is not there or damaged.

    Raises:
        OSError: it can't be read.
    """
    try:
        return read_object(path, KINDS if path.name == "status.json" else {})
    except (FileNotFoundError, ValueError):
        return {}


def fill(backend: Backend, known: bool, lines: Sequence[dict[str, Any]]) -> int:
    """Log the numbers that a tracker lacks; return how many.

    Args:
        backend: the tracker.
        known: whether it already has the run.
        lines: of metrics.jsonl.
    """
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
    """Log the pictures of a run; leave out files that are not pictures."""
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
