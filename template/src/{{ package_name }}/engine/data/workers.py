"""Starts and ends loading workers.

If a process with threads, such as those of Gloo, is forked, the new process can hang: a lock that a
thread held stays locked there. So the workers of a rank are forked from a process without threads,
the fork server of Python's multiprocessing.

Slurm signals every process of a step, but only the ranks act on signals. The fork server and the
workers ignore signals from the moment when they start.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.queues import Queue
from pickle import PicklingError
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset

from ..errors import UsageError
from ..ranks.environment import Ranks
from ..ranks.signals import StopRequest, ignore_signals


def loading_workers(workers: int | Literal["auto"]) -> dict[str, Any]:
    """Return the options of a DataLoader for a number of workers.

    "auto" is one fewer than the CPUs of this rank, so that the rank keeps one CPU.
    """
    if workers == "auto":
        workers = Ranks.from_environment(os.environ).cpus(os.environ) - 1
    # On macOS and Windows, workers start as new programs, without a fork.
    context = "forkserver" if workers and sys.platform == "linux" else None
    options = {"num_workers": workers, "multiprocessing_context": context}
    return {**options, "worker_init_fn": _begin}


def started(loader: DataLoader, dataset: Dataset) -> Iterator[Any]:
    """Start the workers of a loader, and return an iterator over its batches of one epoch.

    Raises:
        UsageError: the workers can't start, or the dataset can't be pickled for them. The iterator
            raises it if a worker raised a UsageError or was killed.
    """
    try:
        if loader.multiprocessing_context:
            _start_fork_server(type(dataset).__module__)
        return _loaded(iter(loader))
    except (PicklingError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        raise UsageError(
            f"loading workers can't start with {type(dataset).__name__} of data.py: {error}; make "
            "it without lambdas and open files, make room in /dev/shm, set TMPDIR to a short path, "
            "or use --workers 0"
        ) from None


def _loaded(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        try:
            yield from batches
        except (ConnectionError, EOFError):
            # The worker that sent this batch may have been killed. If so, the loader raises the
            # RuntimeError below when it is asked again after a moment.
            time.sleep(1)
            with suppress(ConnectionError, EOFError):
                next(batches, None)
            raise
    except UsageError as error:
        # The text of a worker's error is a traceback, which ends with the message.
        raise UsageError(str(error).strip().rpartition("UsageError: ")[2]) from None
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise UsageError(
            f"a loading worker ended, perhaps because memory ran out ({error}): ask for more "
            "memory, or use fewer --workers"
        ) from None


def _start_fork_server(module: str) -> None:
    """Start this rank's fork server, if it does not run yet.

    Args:
        module: the name of the dataset's module.
    """
    # The fork server imports these modules once, so that workers need not import them.
    multiprocessing.set_forkserver_preload(["torch.utils.data", module])
    # A new process inherits the blocked signals, so the fork server starts with them blocked. If a
    # signal comes meanwhile, the rank gets it when it unblocks signals. The resource tracker starts
    # first: otherwise the fork server would start it, and that unblocks some signals.
    for start in (resource_tracker.ensure_running, forkserver.ensure_running):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, StopRequest.SIGNALS)
        try:
            start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(_worker: int) -> None:
    """Prepare a new loading worker: it ignores signals, and ends when its rank ends."""
    ignore_signals()
    # By default, a worker drops a batch that it can't send, and the rank waits for it forever.
    Queue._on_queue_feeder_error = staticmethod(_leave_with_error)  # type: ignore[attr-defined]
    threading.Thread(target=_leave_with_rank, daemon=True).start()


def _leave_with_error(error: Exception, _batch: object) -> None:
    line = str(error).partition("\n")[0]
    print(f"error: a loading worker can't send a batch: {line}", file=sys.stderr, flush=True)
    os._exit(1)


def _leave_with_rank() -> None:
    # DataLoader's workers end when their parent process ends. But here the parent is the fork
    # server, which itself waits for the workers.
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)
