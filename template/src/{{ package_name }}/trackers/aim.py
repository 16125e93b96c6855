"""Aim: a repository for each experiment, or the server that AIM_REPO names (aim://HOST:PORT).

A repository has a RocksDB database for each run, which only the run's own process writes, and one
SQLite database for names, experiments and tags, which all runs of the experiment share. Both need
POSIX locks: on a file system without them (Lustre mounted without `flock`, old NFS), Aim can't open
a repository. On a file system whose locks are not reliable, the lock file below separates runs that
start at the same time. It does not protect against changes that people make in Aim's UI or with its
commands meanwhile. A server (`aim server`, with the repository on its local disk) has none of these
limits.
"""

import json
import logging
import os
import time as clock
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aim
import numpy as np
from aim.ext.cleanup import AutoClean
from aim.ext.resource.log import LogLine
from aim.storage.hashing import hash_auto
from aim.storage.treeview import TreeView
from filelock import SoftFileLock, Timeout

from ..engine.run.media import binned
from ..engine.run.status import SILENCE_LIMIT, Status
from . import Backend, History, Run

logging.getLogger("aim").setLevel(logging.WARNING)
# At each resume, Aim would log that it takes over the lock of the last attempt.
logging.getLogger("aim.sdk.lock_manager").setLevel(logging.ERROR)
# Aim closes a run and waits when the run is garbage-collected. A reference here prevents this.
_open: "set[aim.Run]" = set()

STATE = (
    "Aim had its last release in May 2025, and a query may run code as the owner of its server "
    "(CVE-2025-51464, CVE-2025-5321): let 'monitor' start its pages and its server"
)
STALE_SECONDS = 120  # an older lock file of another machine belongs to a dead process


class Tracker(Backend):
    """A run in Aim. A step that is logged again replaces its earlier values.

    Aim's search knows these attributes of a run: `run.settings.lr` and other settings,
    `run.provenance.git.commit`, `run.status`, `run.error`, `run.directory`. The page "Logs" has
    the log.
    """

    def __init__(self, run: Run) -> None:
        repo = opened(run)
        # If the run was deleted or is in another repository, a new one is started.
        known = run.run_id if run.run_id and repo.run_exists(run.run_id) else None
        shared = None if known or repo.is_remote_repo else Path(repo.path)
        with alone(shared) if shared else nullcontext():
            self.run = aim.Run(
                run_hash=known,
                force_resume=known is not None,
                repo=repo,
                experiment=None if known else run.experiment,
                # These would store the output and the environment, which may contain secrets.
                log_system_params=False,
                capture_terminal_logs=False,
                system_tracking_interval=None,
            )
            _open.add(self.run)
            if not known:
                self.run.name = run.name
                for tag in run.tags:
                    self.run.add_tag(tag)
        self.run_id = self.run.hash
        self.resume_step = run.resume_step
        self.last, self.longest = clock.time(), 0.0
        # One attribute for all packages: otherwise each would be a column of Aim's table.
        packages = [f"{name}=={v}" for name, v in run.provenance.get("packages", {}).items()]
        attributes = {
            "settings": run.settings,
            "provenance": {**run.provenance, "packages": packages},
            "directory": str(run.directory),
            "status": "running",
            "error": None,
        }
        for name, value in attributes.items():
            self.run[name] = json.loads(json.dumps(value, default=str))

    def history(self) -> History:
        """Return what earlier attempts logged; delete what is after the step to resume from."""
        held: History = {}
        for context, traces in _summaries(self.run).get("traces", {}).items():
            for name, trace in traces.items():
                if trace["version"] != 2:  # not a metric
                    continue
                series = _metrics(self.run).subtree((context, name))
                values = dict(series.subtree("val").items())
                steps = dict(series.subtree("step").items())
                # After a kill, one of the two may be missing. Aim would pair the other one with a
                # wrong step.
                for key in values.keys() ^ steps.keys():
                    for part in ("val", "step", "epoch", "time"):
                        del series[part, key]
                each = {step: values[key] for key, step in steps.items() if key in values}
                held[name] = {step: each[step] for step in each if step <= self.resume_step}
                for step in each.keys() - held[name].keys():
                    for part in ("val", "step", "epoch", "time"):
                        del series[part, hash_auto(step)]
                if trace["last_step"] > self.resume_step:
                    self._correct(context, name, held[name])
        return held

    def _correct(self, context: int, name: str, values: dict[int, float]) -> None:
        """Correct the summary that Aim stores of a metric."""
        known = _known(self.run)[context, name]
        known.count = max(values, default=-1) + 1
        known.min = min(values.values(), default=float("inf"))
        known.max = max(values.values(), default=float("-inf"))
        if not values:
            del _summaries(self.run)["traces", context, name]
            del _summaries(self.run)["typed_traces", "metric", context, name]
            return
        trace = _summaries(self.run).subtree(("traces", context, name))
        trace["last_step"], trace["last"] = max(values), values[max(values)]
        trace["min"], trace["max"] = known.min, known.max

    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Record each metric, and tell Aim's watcher when to expect the next ones."""
        numbers = {name: float(value) for name, value in metrics.items()}
        _track(self.run, numbers, time, step)
        now = clock.time()
        self.longest, self.last = max(self.longest, now - self.last), now
        self.run.report_progress(expect_next_in=int(max(SILENCE_LIMIT, 5 * self.longest)))

    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Record a picture."""
        self.run.track(aim.Image(image), name=name, step=step)

    def log_histogram(self, name: str, values: np.ndarray, step: int) -> None:
        """Record a histogram of the finite values."""
        counts, edges = binned(values)
        if counts.any():
            histogram = aim.Distribution(hist=counts, bin_range=(edges[0], edges[-1]))
            self.run.track(histogram, name=name, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Record the log line by line, for Aim's page "Logs", and any other text as a whole."""
        if name != "log":
            self.run.track(aim.Text(text), name=name, step=step)
            return
        for number, line in enumerate(text.splitlines()):
            self.run.track(LogLine(line), name="logs", step=number)

    def flush(self) -> None:
        """Wait until a server has received everything. A local repository needs no wait."""
        with suppress(ConnectionError):  # the server may work again before the end of the run
            self._wait_for_server()

    def _wait_for_server(self) -> None:
        client = _client(self.run)
        if client:
            try:
                client.client_heartbeat()
            except OSError:
                raise ConnectionError("the Aim server of AIM_REPO does not answer") from None
            client.get_queue().wait_for_finish()

    def finish(self, status: Status, error: str | None) -> None:
        """Record how the run ended, for Aim's watcher too, and close the run."""
        self._wait_for_server()
        self.run["status"] = status
        self.run["error"] = error
        if status == "finished":
            self.run.report_successful_finish()
        elif status == "preempted":
            self.run.log_warning("stopped, and goes on when its job is started again")
            self.run.report_progress(expect_next_in=0, block=True)  # whenever that is
        else:
            self.run.log_error(error or "failed")
            self.run.report_progress(expect_next_in=1, block=True)  # overdue at once
        self.run.close()
        _open.discard(self.run)


def opened(run: Run) -> aim.Repo:
    """Return the repository that AIM_REPO names (a folder or a server), or the experiment's own.

    Raises:
        RuntimeError: the server does not answer.
    """
    address = os.environ.get("AIM_REPO")
    if not address:
        return aim.Repo.from_path(repository(run.store))
    try:
        return aim.Repo.from_path(address)
    except Exception as error:  # its traceback would fill a screen
        raise RuntimeError(f"can't open what AIM_REPO names: {error}") from None


def repository(root: Path) -> str:
    """Return the folder with Aim's repository; create the repository if it does not exist.

    A new repository is created in another place and then moved. Several jobs may start at the same
    time, and none of them may see an incomplete repository.
    """
    if not (root / ".aim").exists():
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root, prefix=".aim-") as fresh:
            aim.Repo.from_path(fresh, init=True).close()
            with suppress(OSError):  # another job was first
                Path(fresh, ".aim").rename(root / ".aim")
    return str(root)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Let only one process at a time start a run in a repository.

    The lock is a file that only one process can create, even on shared file systems. If its owner
    died on this machine, `filelock` removes the file. If it died on another machine, the file is
    removed after STALE_SECONDS.
    """
    ours = folder / "new_run.lock"
    lock = SoftFileLock(ours)
    while not lock.is_locked:
        # Aim's own lock is a file too. Its owner also owned ours, so both may be stale.
        for path in (ours, folder / "locks" / "structured_db_lock"):
            with suppress(OSError):
                if clock.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
        with suppress(Timeout):
            lock.acquire(timeout=10)
    try:
        yield
    finally:
        lock.release()


# The code below uses names that Aim does not document. Aim's version is pinned, and a test fails if
# a version lacks one of these names.

# Do not let Aim close open runs at exit: it would wait forever if its server is down. `finish`
# closes them.
AutoClean._registered_with_atexit = True


def _track(run: aim.Run, numbers: dict[str, float], time: float, step: int) -> None:
    """Record numbers with the time of measurement; `run.track` records the time of the call."""
    run._tracker._track(numbers, time, step=step)


def _known(run: aim.Run) -> dict[tuple[int, str], Any]:
    """Return what an open run stores in memory about its metrics, by context and name."""
    return run._tracker.sequence_infos


def _summaries(run: aim.Run) -> TreeView:
    """Return the summaries that the repository has of a run's metrics."""
    return run.meta_run_tree


def _metrics(run: aim.Run) -> TreeView:
    """Return the values of a run's metrics, in the format of version 2."""
    return run.series_run_trees[2]


def _client(run: aim.Run) -> Any:  # noqa: ANN401 - a class that Aim does not document
    """Return the connection to a server, or None for a local repository."""
    return run.repo._client
