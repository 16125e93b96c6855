"""All chosen trackers as one, each in a thread of its own: none can hold up the training."""

import json
import logging
import os
import queue
import re
import signal
import threading
import time
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus, unquote

from ..core.filesystem import open_regular, read_lines, read_object, write_atomically
from ..core.output.status import Status
from ..core.ranks.signals import StopRequest
from . import Backend, Run, load, set_variables

log = logging.getLogger(__name__)

FLUSH_SECONDS = 10  # that a checkpoint waits for a tracker; the next ones do not wait at all
# That the end of the run waits for all trackers together; a run that was stopped has less time.
FINISH_SECONDS = {"finished": 60, "failed": 60, "preempted": 20}
BACKLOG = 10_000  # calls that may wait for a tracker before it is given up


class Trackers:
    """All chosen trackers as one. With none chosen, every call does nothing.

    No call waits for a tracker, but `flush` and `finish`, and these not for long. A tracker that
    fails is started again once; after that, or if it hangs, it is off for the rest of the attempt.
    metrics.jsonl has the numbers all the same, and `sync` sends later what a tracker missed.

    Args:
        names: as `select` returned them.
        run: what to tell them; its `run_id` is replaced by each tracker's own.
        earlier: lines of metrics.jsonl up to the step that this attempt goes on from.
    """

    def __init__(
        self, names: Sequence[str], run: Run, earlier: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        self.run = run
        self.lock = threading.Lock()
        own_ids, main_ids = known_ids(run.directory, run.rank), known_ids(run.directory, 0)
        lines = list(earlier)
        self.threads = [
            _Thread(
                name,
                replace(run, run_id=own_ids.get(name), main_id=main_ids.get(name)),
                lines,
                self._started,
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
        """Record something else, by the method of `Backend` that is called log_ and its kind."""
        self._each(f"log_{kind}", *arguments)

    def flush(self) -> None:
        """Make everything logged so far outlive the process."""
        ends = [thread.flush() for thread in self.threads]
        deadline = time.monotonic() + FLUSH_SECONDS
        for thread, end in zip(self.threads, ends, strict=True):
            if end is not None and not end.wait(max(0.0, deadline - time.monotonic())):
                thread.fall_behind()

    def finish(self, status: Status, error: str | None = None) -> None:
        """Close the run in all trackers; one that does not come to an end is left behind."""
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
        return [thread.name for thread in self.threads if thread.trouble]

    def _each(self, method: str, *arguments: Any) -> None:  # noqa: ANN401
        for thread in self.threads:
            thread.call(method, *arguments)

    def _started(self, name: str, run_id: str) -> None:
        """Note a run's id at once: an attempt that is killed now is continued all the same."""
        with self.lock:
            note_id(self.run.directory, self.run.rank, name, run_id)


def left_behind() -> bool:
    """Return whether a tracker still hangs in the middle of a call."""
    return any(isinstance(thread, _Thread) for thread in threading.enumerate())


def known_ids(directory: Path, rank: int) -> dict[str, str]:
    """Return the ids that trackers gave to a rank's run, by tracker."""
    try:
        return read_object(_file_of_ids(directory, rank), {})
    except (FileNotFoundError, ValueError):
        return {}


def _wait_for_id(directory: Path, tracker: str) -> str | None:
    """Return the id of rank 0's run, which starts at the same time; None if it does not."""
    deadline = time.monotonic() + 60
    while not (found := known_ids(directory, 0).get(tracker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def note_id(directory: Path, rank: int, tracker: str, run_id: str) -> None:
    """Remember the id that a tracker gave to a rank's run."""
    ids = known_ids(directory, rank) | {tracker: run_id}
    write_atomically(_file_of_ids(directory, rank), json.dumps(ids, indent=2) + "\n")


def _file_of_ids(directory: Path, rank: int) -> Path:
    return directory / (f"trackers-rank{rank}.json" if rank else "trackers.json")


class _Thread(threading.Thread):
    """One tracker, and the calls that wait for it."""

    def __init__(
        self,
        name: str,
        run: Run,
        earlier: Sequence[Mapping[str, Any]],
        started: Callable[[str, str], None],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.started = partial(started, name)
        self.tracked, self.earlier = replace(run, started=self.started), earlier
        self.restarted = False
        # Lines that the tracker was given, and may lose if it fails.
        self.unflushed: list[dict[str, Any]] = []
        self.calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self.trouble: str | None = None
        self.waited_in_vain: threading.Event | None = None
        self.flushing: threading.Event | None = None

    # -- from the training's thread ---------------------------------------------------------------

    def call(self, method: str, *arguments: Any) -> None:  # noqa: ANN401
        """Let the tracker do something when it has time."""
        if self.trouble:
            return
        if self.calls.qsize() > BACKLOG:
            self.give_up(f"is {BACKLOG} calls behind")
            return
        self.calls.put((method, arguments))

    def flush(self) -> threading.Event | None:
        """Start to flush; return what is set at its end, None where waiting is no use."""
        if self.trouble or (self.waited_in_vain and not self.waited_in_vain.is_set()):
            return None
        self.waited_in_vain = None
        self.flushing = threading.Event()
        self.call("flush")
        self.call("flushed", self.flushing)
        return self.flushing

    def fall_behind(self) -> None:
        """Note that a flush took too long, once."""
        self.waited_in_vain = self.flushing
        log.warning(
            "tracker %s has not answered for %d seconds; training goes on without waiting for it",
            self.name,
            FLUSH_SECONDS,
        )

    def give_up(self, reason: str) -> None:
        """Switch the tracker off."""
        if self.trouble is None:
            self.trouble = reason
            log.warning("tracker %s %s and is off; %s", self.name, reason, self._later())

    @property
    def _errors(self) -> Path:
        return self.tracked.directory / "tracker-errors.txt"

    def _later(self) -> str:
        package = __package__.partition(".")[0]
        return f"'python -m {package} sync {self.tracked.directory}' sends later what it missed"

    # -- in the tracker's own ---------------------------------------------------------------------

    def run(self) -> None:
        """Start the tracker and do what is asked, until the end or the first failure."""
        # Processes that it starts inherit this: a signal of Slurm goes to all of a rank's.
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, StopRequest.SIGNALS)
        doing = "could not start"
        try:
            backend = self._start()
            doing = "failed"
            while not self.trouble and (call := self.calls.get()) is not None:
                try:
                    self._do(backend, *call)
                except Exception as error:
                    if self.restarted:
                        raise
                    backend = self._restart(error)
                    self._do(backend, *call)
        except BaseException as error:
            if self.trouble is None:
                self.trouble = doing
                log.error(
                    "tracker %s %s and is off (%s); %s; tracker-errors.txt in that folder has more",
                    self.name,
                    doing,
                    without_secrets(f"{type(error).__name__}: {error}").splitlines()[0],
                    self._later(),
                )
                with suppress(OSError), open_regular(self._errors, "a") as file:
                    file.write(without_secrets("".join(traceback.format_exception(error))) + "\n")
        if self.flushing:
            self.flushing.set()

    def _start(self) -> Backend:
        if self.tracked.rank and not self.tracked.main_id:
            main = _wait_for_id(self.tracked.directory, self.name)
            self.tracked = replace(self.tracked, main_id=main)
        backend = load(self.name).Tracker(self.tracked)
        self.started(backend.run_id)
        # Of a run that goes on: what it has already, and what it lacks.
        self.held = backend.history() if self.tracked.run_id else {}
        for line in self.earlier:
            values = {name: value for name, value in line.items() if name not in ("step", "time")}
            self._log_metrics(backend, values, line["step"], line.get("time", time.time()))
            for name, value in values.items():
                self.held.setdefault(name, {})[line["step"]] = value
        return backend

    def _restart(self, error: Exception) -> Backend:
        """Start the tracker a second time: a signal may have hit a process of its own."""
        self.restarted = True
        reason = without_secrets(f"{type(error).__name__}: {error}").splitlines()[0]
        log.info("tracker %s failed (%s) and starts again", self.name, reason)
        known = known_ids(self.tracked.directory, self.tracked.rank).get(self.name)
        # What it lost is in the file, unless a full disk kept it out.
        main = self.tracked.rank == 0
        written = read_lines(self.tracked.directory / "metrics.jsonl") if main else []
        self.earlier = written + self.unflushed
        last = max((line["step"] for line in self.earlier), default=self.tracked.resume_step)
        self.tracked = replace(self.tracked, run_id=known, resume_step=last)
        return self._start()

    def _do(self, backend: Backend, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "flushed":
            self.unflushed.clear()
            arguments[0].set()
        elif method == "log_metrics":
            metrics, step, time = arguments
            self.unflushed.append({"step": step, "time": time, **metrics})
            self._log_metrics(backend, metrics, step, time)
        else:
            getattr(backend, method)(*arguments)

    def _log_metrics(
        self, backend: Backend, metrics: Mapping[str, float], step: int, time: float
    ) -> None:
        new = {
            name: value for name, value in metrics.items() if step not in self.held.get(name, ())
        }
        if new:
            backend.log_metrics(new, step, time)


def without_secrets(text: str) -> str:
    """Return a text without the values of secret variables, and logins in addresses."""
    hidden = {}
    for name, value in os.environ.items():
        secrets = re.findall(r"://[^/:@\s]*:(\S+)@", value)
        secrets += [value] if re.search("KEY|TOKEN|PASSW|SECRET", name) else []
        for secret in secrets:
            if len(secret) >= 6:
                hidden |= dict.fromkeys(_spellings(secret), f"<{name}>")
    for spelling in sorted(hidden, key=len, reverse=True):
        text = text.replace(spelling, hidden[spelling])
    return re.sub(r"(?<=://)\S+@", "<login>@", text)


def _spellings(secret: str) -> Iterator[str]:
    """Yield how a secret may be written: as it is, as part of an address, in base64."""
    for plain in (secret, unquote(secret)):
        yield from (plain, quote(plain), quote(plain, safe=""), quote_plus(plain))
        # In base64 it depends on how many bytes stand before it, such as those of a user's name.
        for before, first in enumerate((0, 2, 3)):
            content = bytes(before) + plain.encode()
            yield b64encode(content)[first : len(content) // 3 * 4].decode()
