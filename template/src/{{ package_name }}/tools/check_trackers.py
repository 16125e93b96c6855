"""Logs a small run to each tracker and reads it back: `python -m <package> check-trackers`.

With several tasks (`srun --ntasks=4 ...`), it checks that they can write to one store together.
"""

import dataclasses
import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimeIsUp
from pathlib import Path

from ..engine.errors import UsageError, say, without_secrets
from ..settings import Settings
from ..trackers import Run, load, select

log = logging.getLogger(__name__)

SECONDS = 120  # time limit of a tracker
METRICS = {"check/loss": lambda step: 1 / step, "check/accuracy": lambda step: 1 - 1 / step}
STEPS = range(1, 21)


def main(argv: Sequence[str]) -> int:
    """Check the trackers that the settings name; return 0 if all kept everything, else 1.

    Raises:
        UsageError: a tracker is unknown, none is chosen, or the folder can't be made.
    """
    settings = Settings.parse(argv, prog="check-trackers")
    names = select(settings.trackers)
    if not names:
        raise UsageError("no tracker is chosen: name some, such as --trackers tensorboard")
    task = os.environ.get("SLURM_PROCID", "0")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}"
    store = Path(settings.run_root, "check-trackers").absolute()
    directory = store / name
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise UsageError(
            f"can't make {directory}: {error.strerror}; choose another place with --run-root"
        ) from None
    run = Run(
        directory=directory,
        store=store,
        name=f"check-trackers/{name}",
        experiment="check-trackers",
        settings={"task": int(task), **settings.as_dict()},
        tags=("check",),
    )
    failures = 0
    for tracker in names:
        began = time.monotonic()
        if trouble := attempt(tracker, run):
            failures += 1
            say(f"{tracker:12} FAILED  {trouble}")
        else:
            count, seconds = len(METRICS) * len(STEPS), time.monotonic() - began
            say(f"{tracker:12} ok      {count} numbers read back, {seconds:.1f} s")
    if failures:
        log.error("%d of %d trackers failed; what they left is in %s", failures, len(names), store)
    else:
        shutil.rmtree(directory)
    # Not sys.exit: it would wait for a tracker that hangs.
    os._exit(1 if failures else 0)


def attempt(name: str, run: Run) -> str | None:
    """Return what is wrong with a tracker as one line, or None."""
    try:
        ThreadPoolExecutor(1).submit(log_and_read, name, run).result(SECONDS)
    except TimeIsUp:
        return f"no end after {SECONDS} seconds: is its server out of reach?"
    except Exception as error:
        return without_secrets(f"{type(error).__name__}: {error}").splitlines()[0]
    return None


def log_and_read(name: str, run: Run) -> None:
    """Log a run, resume it, and compare its history with what was logged.

    Raises:
        ValueError: something is missing or has another value.
    """
    import numpy as np

    Tracker = load(name).Tracker
    tracker = Tracker(run)
    for step in STEPS:
        values = {metric: value(step) for metric, value in METRICS.items()}
        tracker.log_metrics(values, step, time.time())
    tracker.log_image("check/image", np.zeros((32, 32, 3), np.uint8), STEPS[-1])
    tracker.log_text("log", "a line\nand another\n", STEPS[-1])
    tracker.flush()
    tracker.finish("preempted", None)

    again = Tracker(dataclasses.replace(run, resume_step=STEPS[-1], run_id=tracker.run_id))
    held = again.history()
    again.finish("finished", None)
    for metric, value in METRICS.items():
        found = held.get(metric, {})
        for step in STEPS:
            if step not in found or not math.isclose(found[step], value(step), rel_tol=1e-6):
                raise ValueError(f"{metric} at step {step} is {found.get(step)}, not {value(step)}")
