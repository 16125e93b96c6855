"""Logs a small run to each tracker and reads it back: `python -m <package> check-trackers`.

With several tasks (`srun --ntasks=4 ...`), it checks that they can write to the same store at the
same time.
"""

import dataclasses
import math
import os
import shutil
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..engine.errors import UsageError, say, without_secrets
from ..settings import Settings
from ..trackers import Run, load, select

SECONDS = 120  # time limit for each tracker
METRIC = "check/loss"
VALUES = {step: 1 / step for step in range(1, 21)}


def main(argv: Sequence[str]) -> int:
    """Check the trackers that the settings name; exit with 0 if all kept everything, else with 1.

    Raises:
        UsageError: a tracker is unknown, no tracker is chosen, or the folder can't be made.
    """
    settings = Settings.parse(
        argv, "check-trackers", "Log a run to each tracker and read it back. "
    )
    names = select(settings.trackers)
    if not names:
        raise UsageError("no tracker is chosen: name some, such as --trackers tensorboard")
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}"
    store = Path(settings.run_root, "check-trackers").absolute()
    directory = store / name
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise UsageError(f"can't make {directory}: {error.strerror}; change --run-root") from None
    run = Run(directory, store, f"check-trackers/{name}", "check-trackers", settings.as_dict())
    failed = False
    for tracker in names:
        result = f"ok      {len(VALUES)} numbers read back"
        try:
            ThreadPoolExecutor(1).submit(log_and_read, tracker, run).result(SECONDS)
        except Exception as error:
            reason = str(error) or f"not finished after {SECONDS} s: check its server"
            reason = without_secrets(f"{type(error).__name__}: {reason}").splitlines()[0]
            failed, result = True, f"FAILED  {reason}; its files are in {store}"
        say(f"{tracker:12} {result}")
    if not failed:
        shutil.rmtree(directory)
    # A normal exit would wait for a tracker that hangs.
    os._exit(int(failed))


def log_and_read(name: str, run: Run) -> None:
    """Log a run, resume it, and compare its history with what was logged.

    Raises:
        ValueError: a value is missing or different.
    """
    import numpy as np

    Tracker = load(name).Tracker
    tracker, last = Tracker(run), max(VALUES)
    for step, value in VALUES.items():
        tracker.log_metrics({METRIC: value}, step, time.time())
    tracker.log_image("check/image", np.zeros((32, 32, 3), np.uint8), last)
    tracker.log_text("log", "a line\nand another\n", last)
    tracker.flush()
    tracker.finish("preempted", None)

    again = Tracker(dataclasses.replace(run, resume_step=last, run_id=tracker.run_id))
    held = again.history().get(METRIC, {})
    again.finish("finished", None)
    for step, value in VALUES.items():
        if not math.isclose(held.get(step, math.nan), value, rel_tol=1e-6):
            raise ValueError(f"{METRIC} at step {step} is {held.get(step)}, not {value}")
