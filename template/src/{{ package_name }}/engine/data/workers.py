"""How loading workers start and end.

A process that is forked from one with threads, such as Gloo's, can hang for ever: a lock that one
of them held stays locked in the copy. So workers are forked from a helper without threads, the
fork server of Python's multiprocessing; each rank that loads with workers has its own.

Slurm signals every process of a step, and what to do then is for the ranks to decide. Helpers and
workers ignore signals from the moment they start.
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
from tempfile import gettempdir
from types import TracebackType
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset

from ..errors import UsageError
from ..ranks.environment import Ranks
from ..ranks.signals import StopRequest, ignore_signals


def loading_workers(workers: int | Literal["auto"], dataset: Dataset) -> dict[str, Any]:
    """Return the options of a DataLoader that loads with a number of workers, or with none.

    Args:
        workers: how many; auto: one for each CPU that this rank has besides its first.
        dataset: what they get.
    """
    if workers == "auto":
        workers = Ranks.from_environment(os.environ).cpus(os.environ) - 1
    options: dict[str, Any] = {"num_workers": workers}
    if workers:
        options["worker_init_fn"] = _begin
    # Elsewhere workers are not forked: they start as new programs (macOS, Windows).
    if workers and sys.platform == "linux":
        _start_fork_server(type(dataset).__module__)
        options["multiprocessing_context"] = "forkserver"
    return options


def started(loader: DataLoader, dataset: Dataset) -> Iterator[Any]:
    """Return a loader's batches of an epoch, which its workers load from now on from a dataset.

    Raises:
        UsageError: workers can't get the dataset, as it can't be pickled, or /dev/shm is too
            small for it; later, one was killed.
    """
    try:
        return _loaded(iter(loader))
    except RuntimeError as error:
        if "</torch_" not in str(error):  # as files in /dev/shm are called
            raise
        raise UsageError(
            f"loading workers can't get the dataset: {error}; make room in /dev/shm, or use "
            "--workers 0"
        ) from None
    except (PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"loading workers can't get the {type(dataset).__name__} of data.py: {error}; "
            "make it without lambdas and open files (a worker opens them at its first read), or "
            "use --workers 0"
        ) from None


def _loaded(batches: Iterator[Any]) -> Iterator[Any]:
    try:
        try:
            yield from batches
        except (ConnectionError, EOFError):
            # Perhaps of a batch on its way from a worker that was killed. Once that is known, the
            # loader says so when it is asked again.
            time.sleep(1)
            with suppress(ConnectionError, EOFError):
                next(batches, None)
            raise
    except UsageError as error:
        # A worker's comes with its traceback, and then the message.
        raise UsageError(str(error).strip().rpartition("UsageError: ")[2]) from None
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise UsageError(
            f"a loading worker is gone, killed for its memory perhaps ({error}): ask for more "
            "memory, or use fewer --workers"
        ) from None


def _start_fork_server(module: str) -> None:
    """Start this rank's fork server, with the dataset's module, unless it runs already."""
    # What each worker imports: forked from a process that has it, a worker starts at once.
    multiprocessing.set_forkserver_preload(["torch.utils.data", module])
    # A new program inherits which signals are blocked, and so do its forks. The rank itself gets
    # what came meanwhile when it unblocks them. The resource tracker has a turn of its own since
    # starting it, which the fork server would do, unblocks some.
    for start in (resource_tracker.ensure_running, forkserver.ensure_running):
        before = signal.pthread_sigmask(signal.SIG_BLOCK, StopRequest.SIGNALS)
        try:
            start()
        except OSError as error:
            raise UsageError(
                f"loading workers can't start: {error}; their socket is in {gettempdir()}, so set "
                "TMPDIR to another, short path, or use --workers 0"
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(_worker: int) -> None:
    """Let this process, a new loading worker, ignore signals, and end when its rank does."""
    ignore_signals()
    sys.excepthook = _report
    # A batch that can't be sent is dropped by default, and its rank would wait for it.
    Queue._on_queue_feeder_error = staticmethod(_leave_with_error)  # type: ignore[attr-defined]
    threading.Thread(target=_leave_with_rank, daemon=True).start()


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what went wrong, unless it is that the rank is gone: that has a reason of its own."""
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join(1)  # its connections are closed first
    if rank.is_alive():
        sys.__excepthook__(kind, error, trace)


def _leave_with_error(error: Exception, _batch: object) -> None:
    line = str(error).partition("\n")[0]
    print(f"error: a loading worker can't send a batch: {line}", file=sys.stderr, flush=True)
    os._exit(1)


def _leave_with_rank() -> None:
    # DataLoader's workers watch their parent, the fork server; but that one waits for them.
    rank = multiprocessing.parent_process()
    assert rank is not None
    rank.join()
    os._exit(1)
