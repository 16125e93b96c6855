"""All chosen trackers as one. Each has its own thread, so that none can delay the training."""

import json
import logging
import queue
import signal
import threading
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..engine.errors import without_secrets
from ..engine.filesystem import open_regular, read_object, write_atomically
from ..engine.ranks.signals import StopRequest
from ..engine.run.status import Status
from . import Backend, Run, load

log = logging.getLogger(__name__)

# How long the end of a run waits for all trackers together; a job that is stopped has less time.
FINISH_SECONDS = {"finished": 60, "failed": 60, "preempted": 20}
BACKLOG = 10_000  # calls that may wait for a tracker before it is switched off
_ids_lock = threading.Lock()


class Trackers:
    """All chosen trackers as one. Without any, every call does nothing.

    Calls return at once; only `finish` waits, for a limited time. A tracker that fails is off for
    the rest of the attempt. metrics.jsonl has every number, and `sync` sends what a tracker missed.

    Args:
        names: as `select` returned them.
        run: what to tell them; its `run_id` is replaced by each tracker's own.
        earlier: lines of metrics.jsonl up to the step that this attempt resumes from.
    """

    def __init__(
        self, names: Sequence[str], run: Run, earlier: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self.names, lines = names, list(earlier)
        ids, main_ids = known_ids(run.directory, run.rank), known_ids(run.directory, 0)
        self.threads = []
        for name in names:
            started = partial(note_id, run.directory, run.rank, name)
            run = replace(run, run_id=ids.get(name), main_id=main_ids.get(name), started=started)
            self.threads.append(_TrackerThread(name, run, lines))
        for thread in self.threads:
            thread.start()

    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Record numbers of a step."""
        self._each("log_metrics", dict(metrics), step, time)

    def log(self, kind: str, *arguments: Any) -> None:  # noqa: ANN401 - what the method takes
        """Record something else by the method of `Backend` whose name is log_ and the kind."""
        self._each(f"log_{kind}", *arguments)

    def flush(self) -> None:
        """Ask the trackers to save what was logged, so that it survives the end of the process."""
        self._each("flush")

    def finish(self, status: Status, error: str | None = None) -> None:
        """Close the run in all trackers; do not wait longer than `FINISH_SECONDS`."""
        self._each("finish", status, error)
        deadline = time.monotonic() + FINISH_SECONDS[status]
        for thread in self.threads:
            thread.calls.put(None)
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                thread.switch_off(f"has not come to an end within {FINISH_SECONDS[status]} seconds")

    @property
    def failed(self) -> list[str]:
        """The trackers that are off."""
        return [thread.name for thread in self.threads if thread.off]

    def _each(self, method: str, *arguments: Any) -> None:  # noqa: ANN401
        for thread in self.threads:
            thread.call(method, *arguments)


def left_behind() -> bool:
    """Return whether a tracker failed or still hangs: its library may fail or hang at exit."""
    threads = threading.enumerate()
    return _TrackerThread.any_failed or any(isinstance(each, _TrackerThread) for each in threads)


def known_ids(directory: Path, rank: int) -> dict[str, str]:
    """Return the ids that trackers gave to a rank's run, by tracker."""
    with suppress(FileNotFoundError, ValueError):
        return read_object(_ids_path(directory, rank), {})
    return {}


def note_id(directory: Path, rank: int, tracker: str, run_id: str) -> None:
    """Save the id that a tracker gave to a rank's run."""
    with _ids_lock:
        ids = known_ids(directory, rank) | {tracker: run_id}
        write_atomically(_ids_path(directory, rank), json.dumps(ids, indent=2) + "\n")


def _ids_path(directory: Path, rank: int) -> Path:
    return directory / (f"trackers-rank{rank}.json" if rank else "trackers.json")


class _TrackerThread(threading.Thread):
    """One tracker, and the queue of its calls."""

    any_failed = False

    def __init__(self, name: str, run: Run, earlier: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(name=name, daemon=True)
        self.tracked, self.earlier = run, earlier
        self.calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self.off = False

    def call(self, method: str, *arguments: Any) -> None:  # noqa: ANN401
        """Add a call to the queue, unless the tracker is off."""
        if self.calls.qsize() > BACKLOG:
            self.switch_off(f"is {BACKLOG} calls behind")
        elif not self.off:
            self.calls.put((method, arguments))

    def switch_off(self, reason: str, error: BaseException | None = None) -> None:
        """Make no more calls, and log why; the file tracker-errors.txt gets the traceback."""
        if self.off:
            return
        self.off = True
        command = f"python -m {__package__.partition('.')[0]} sync {self.tracked.directory}"
        remedy = f"'{command}' sends later what it missed"
        if error is None:
            log.warning("tracker %s %s and is off; %s", self.name, reason, remedy)
            return
        _TrackerThread.any_failed = True
        fault = without_secrets(f"{type(error).__name__}: {error}").splitlines()[0]
        more = "tracker-errors.txt in that folder has more"
        log.error("tracker %s %s and is off (%s); %s; %s", self.name, reason, fault, remedy, more)
        path = self.tracked.directory / "tracker-errors.txt"
        with suppress(OSError), open_regular(path, "a") as file:
            file.write(without_secrets("".join(traceback.format_exception(error))) + "\n")

    def run(self) -> None:
        """Start the tracker and make its calls, until the end or the first failure."""
        # Processes that it starts inherit this mask: Slurm signals all processes of a rank.
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, StopRequest.SIGNALS)
        failure = "could not start"
        try:
            backend = self._start()
            failure = "failed"
            while not self.off and (call := self.calls.get()) is not None:
                method, arguments = call
                if method == "log_metrics":
                    self._log_metrics(backend, *arguments)
                else:
                    getattr(backend, method)(*arguments)
        except BaseException as error:
            self.switch_off(failure, error)

    def _start(self) -> Backend:
        run = self.tracked
        deadline = time.monotonic() + 60  # until which rank 0's run should have started
        while run.rank and not run.main_id and time.monotonic() < deadline:
            time.sleep(0.1)
            run = replace(run, main_id=known_ids(run.directory, 0).get(self.name))
        backend = load(self.name).Tracker(run)
        run.started(backend.run_id)
        # A run that is continued has some metrics already; only those that it lacks are logged.
        self.known = backend.history() if run.run_id else {}
        for line in self.earlier:
            values = {name: value for name, value in line.items() if name not in ("step", "time")}
            self._log_metrics(backend, values, line["step"], line.get("time", time.time()))
        return backend

    def _log_metrics(
        self, backend: Backend, metrics: Mapping[str, float], step: int, time: float
    ) -> None:
        new = {name: v for name, v in metrics.items() if step not in self.known.get(name, ())}
        if new:
            backend.log_metrics(new, step, time)
