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
from . import Backend, Run, load, set_variables

log = logging.getLogger(__name__)

# How long the end of a run waits for all trackers together; a job that is stopped has less time.
FINISH_SECONDS = {"finished": 60, "failed": 60, "preempted": 20}
BACKLOG = 10_000  # calls that may wait for a tracker before it is given up


class Trackers:
    """All chosen trackers as one. Without any, every call does nothing.

    Calls return at once; only `finish` waits, for a limited time. A tracker that fails is off for
    the rest of the attempt. metrics.jsonl has every number, and `sync` sends what a tracker missed.

    Args:
        names: as `select` returned them.
        run: what to tell them; its `run_id` is replaced by each tracker's own.
        earlier: lines of metrics.jsonl up to the step that this attempt goes on from.
    """

    def __init__(
        self, names: Sequence[str], run: Run, earlier: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self.names, self.run = names, run
        self.lock = threading.Lock()
        own_ids, main_ids = known_ids(run.directory, run.rank), known_ids(run.directory, 0)
        lines = list(earlier)
        self.threads = [
            _Thread(
                name,
                replace(
                    run,
                    run_id=own_ids.get(name),
                    main_id=main_ids.get(name),
                    started=partial(self._started, name),
                ),
                lines,
            )
            for name in names
        ]
        for name in names:
            set_variables(name)
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
        seconds = FINISH_SECONDS[status]
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            thread.calls.put(None)
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                thread.give_up(f"has not come to an end within {seconds} seconds")

    @property
    def failed(self) -> list[str]:
        """The trackers that are off."""
        return [thread.name for thread in self.threads if thread.off]

    def _each(self, method: str, *arguments: Any) -> None:  # noqa: ANN401
        for thread in self.threads:
            thread.call(method, *arguments)

    def _started(self, name: str, run_id: str) -> None:
        """Save a run's id at once, so that the next attempt continues the run after a kill."""
        with self.lock:
            note_id(self.run.directory, self.run.rank, name, run_id)


def left_behind() -> bool:
    """Return whether a tracker failed or still hangs: its library can't be trusted to exit."""
    return _Thread.any_failed or any(isinstance(each, _Thread) for each in threading.enumerate())


def known_ids(directory: Path, rank: int) -> dict[str, str]:
    """Return the ids that trackers gave to a rank's run, by tracker."""
    try:
        return read_object(_file_of_ids(directory, rank), {})
    except (FileNotFoundError, ValueError):
        return {}


def _wait_for_id(directory: Path, tracker: str) -> str | None:
    """Return the id of rank 0's run, which starts at the same time; None if it does not start."""
    deadline = time.monotonic() + 60
    while not (found := known_ids(directory, 0).get(tracker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def note_id(directory: Path, rank: int, tracker: str, run_id: str) -> None:
    """Save the id that a tracker gave to a rank's run."""
    ids = known_ids(directory, rank) | {tracker: run_id}
    write_atomically(_file_of_ids(directory, rank), json.dumps(ids, indent=2) + "\n")


def _file_of_ids(directory: Path, rank: int) -> Path:
    return directory / (f"trackers-rank{rank}.json" if rank else "trackers.json")


class _Thread(threading.Thread):
    """One tracker, and the queue of its calls."""

    any_failed = False

    def __init__(self, name: str, run: Run, earlier: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(name=name, daemon=True)
        self.tracked, self.earlier = run, earlier
        self.calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self.off = False

    # -- called by the thread that trains ---------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> None:  # noqa: ANN401
        """Add a call to the queue, unless the tracker is off."""
        if self.off:
            return
        if self.calls.qsize() > BACKLOG:
            self.give_up(f"is {BACKLOG} calls behind")
            return
        self.calls.put((method, arguments))

    def give_up(self, reason: str) -> None:
        """Switch the tracker off."""
        if not self.off:
            self.off = True
            log.warning("tracker %s %s and is off; %s", self.name, reason, self._remedy())

    def _remedy(self) -> str:
        package = __package__.partition(".")[0]
        return f"'python -m {package} sync {self.tracked.directory}' sends later what it missed"

    # -- called by the tracker's own thread -------------------------------------------------------

    def run(self) -> None:
        """Start the tracker and make its calls, until the end or the first failure."""
        # Processes that it starts inherit this mask: Slurm signals all processes of a rank.
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, StopRequest.SIGNALS)
        doing = "could not start"
        try:
            backend = self._start()
            doing = "failed"
            while not self.off and (call := self.calls.get()) is not None:
                method, arguments = call
                if method == "log_metrics":
                    self._log_metrics(backend, *arguments)
                else:
                    getattr(backend, method)(*arguments)
        except BaseException as error:
            self._fail(doing, error)

    def _fail(self, doing: str, error: BaseException) -> None:
        """Switch the tracker off, with one line in the log and the traceback in a file."""
        if self.off:
            return
        self.off = _Thread.any_failed = True
        log.error(
            "tracker %s %s and is off (%s); %s; tracker-errors.txt in that folder has more",
            self.name,
            doing,
            without_secrets(f"{type(error).__name__}: {error}").splitlines()[0],
            self._remedy(),
        )
        errors = self.tracked.directory / "tracker-errors.txt"
        with suppress(OSError), open_regular(errors, "a") as file:
            file.write(without_secrets("".join(traceback.format_exception(error))) + "\n")

    def _start(self) -> Backend:
        if self.tracked.rank and not self.tracked.main_id:
            main = _wait_for_id(self.tracked.directory, self.name)
            self.tracked = replace(self.tracked, main_id=main)
        backend = load(self.name).Tracker(self.tracked)
        self.tracked.started(backend.run_id)
        # A run that is continued holds some metrics already; only those that it lacks are logged.
        self.held = backend.history() if self.tracked.run_id else {}
        for line in self.earlier:
            values = {name: value for name, value in line.items() if name not in ("step", "time")}
            self._log_metrics(backend, values, line["step"], line.get("time", time.time()))
        return backend

    def _log_metrics(
        self, backend: Backend, metrics: Mapping[str, float], step: int, time: float
    ) -> None:
        new = {
            name: value for name, value in metrics.items() if step not in self.held.get(name, ())
        }
        if new:
            backend.log_metrics(new, step, time)
