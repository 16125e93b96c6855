"""Sends logs to all chosen trackers. Each has its own thread, so that none delays the training."""

import json
import logging
import queue
import signal
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..engine.config import Settings
from ..engine.errors import without_secrets
from ..engine.filesystem import write_atomically
from ..engine.foreign import read_lines, read_object
from ..engine.ranks.signals import StopRequest
from ..engine.run.description import describe_run
from ..engine.run.status import KINDS, Status
from . import Run, load

log = logging.getLogger(__name__)

# The time limit for all trackers together at the end of a run. A stopped job has less time.
FINISH_SECONDS = {"finished": 60, "failed": 60, "preempted": 20}
MEDIA = ("log_image", "log_histogram", "log_table")  # first argument: a name; last: a step
_ids_lock = threading.Lock()


class Trackers:
    """Passes each call to all chosen trackers. Without trackers, a call does nothing.

    A call returns at once. Only `finish` waits, for a limited time. A tracker that fails is off for
    the rest of the attempt. metrics.jsonl has every number, so that the command `sync` can send
    what a tracker missed.

    Args:
        names: the trackers, from `select`.
        run: the run. Each tracker gets its own `run_id` instead of the one in it.
        earlier: lines of metrics.jsonl up to the step that this attempt resumes from.
    """

    def __init__(
        self, names: Sequence[str], run: Run, earlier: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        ids = known_ids(run.directory)
        runs = {name: replace(run, run_id=ids.get(name)) for name in names}
        self.threads = [_TrackerThread(name, runs[name]) for name in names]
        for line in earlier:
            values = {name: value for name, value in line.items() if name not in ("step", "time")}
            self.call("log_metrics", values, line["step"], line.get("time", 0.0))
        for thread in self.threads:
            thread.start()

    def call(self, method: str, *arguments: Any) -> None:  # noqa: ANN401 - what the method takes
        """Let all trackers call a method of `Backend` soon, in their own threads."""
        for thread in self.threads:
            if not thread.off:
                thread.calls.put((method, arguments))

    def finish(
        self, status: Status, error: str | None = None, seconds: float | None = None
    ) -> list[str]:
        """Close the run in all trackers, with a time limit; return the trackers that are off."""
        self.call("finish", status, error)
        seconds = seconds or FINISH_SECONDS[status]
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.join(0.0 if thread.off else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                thread.switch_off(f"did not finish within {seconds} seconds")
        return [thread.name for thread in self.threads if thread.off]


def send(
    names: Sequence[str], settings: Settings, further: Mapping[str, Any] | None = None
) -> list[str]:
    """Send trackers what they lack of a run that does not train now; return those that failed.

    Args:
        names: the trackers.
        settings: settings of the run, with its `run_dir`.
        further: one more line of metrics to send, in the format of metrics.jsonl.

    Raises:
        OSError, ValueError: a file of the run can't be read.
    """
    from ..engine.run.logging_setup import read_log

    # Read all files before a tracker starts, so that a damaged file stops this first.
    folder = Path(str(settings.run_dir))
    facts = read_object(folder / "provenance.json", {})
    state = read_object(folder / "status.json", KINDS)
    lines, text = read_lines(folder / "metrics.jsonl"), read_log(folder)
    if further:
        had = {name for line in lines if line["step"] == further["step"] for name in line}
        lines.append({k: further[k] for k in further if k in ("step", "time") or k not in had})
    last = max((line["step"] for line in lines), default=0)
    trackers = Trackers(names, describe_run(settings, facts, last), lines)
    trackers.call("log_text", "log", text, last)
    # If the status is still "running", the run was killed.
    status = state.get("status", "running")
    ending: Status = "failed" if status == "running" else status
    return trackers.finish(ending, state.get("error"), seconds=10**6)


def left_behind() -> bool:
    """Return whether a tracker failed or hangs: its library may then fail or hang at exit."""
    return _TrackerThread.any_off


def known_ids(directory: Path) -> dict[str, str]:
    """Return the ids that the trackers gave to a run, by tracker."""
    with suppress(FileNotFoundError, ValueError):
        return read_object(directory / "trackers.json", {})
    return {}


def note_id(directory: Path, tracker: str, run_id: str) -> None:
    """Save the id that a tracker gave to a run."""
    with _ids_lock:
        ids = known_ids(directory) | {tracker: run_id}
        write_atomically(directory / "trackers.json", json.dumps(ids, indent=2) + "\n")


class _TrackerThread(threading.Thread):
    """The thread of one tracker, with the queue of its calls."""

    any_off = False

    def __init__(self, name: str, run: Run) -> None:
        super().__init__(name=name, daemon=True)
        self.tracked, self.off = run, False
        self.calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()

    def switch_off(self, reason: str, fault: str = "") -> None:
        """Stop calling the tracker, and log why."""
        if not self.off:
            self.off = _TrackerThread.any_off = True
            command = f"python -m {__package__.partition('.')[0]} sync {self.tracked.directory}"
            remedy = f"'{command}' sends the missing data later"
            log.error("tracker %s %s and is off%s; %s", self.name, reason, fault, remedy)

    def run(self) -> None:
        """Start the tracker, and make its calls until `finish` or the first failure."""
        # Slurm signals all processes of a rank. The tracker's processes inherit this mask.
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, StopRequest.SIGNALS)
        failure, method = "could not start", ""
        try:
            backend = load(self.name).Tracker(self.tracked)
            note_id(self.tracked.directory, self.name, backend.run_id)
            # If the run is continued, log only what the tracker does not have yet.
            held = backend.history() if self.tracked.run_id else {}
            failure = "failed"
            while not self.off and method != "finish":
                method, arguments = self.calls.get()
                if method == "log_metrics":
                    values, step, time = arguments
                    new = {name: v for name, v in values.items() if step not in held.get(name, ())}
                    if new:
                        backend.log_metrics(new, step, time)
                elif method not in MEDIA or arguments[-1] not in held.get(arguments[0], ()):
                    getattr(backend, method)(*arguments)
        except BaseException as error:
            fault = without_secrets(f"{type(error).__name__}: {error}").splitlines()[0]
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.switch_off(failure, f" ({fault}, {place.filename}:{place.lineno})")
