"""Makes sure that only one training at a time uses a run folder.

Each attempt at a run has a file: `attempts/1.json`, `attempts/2.json` and so on. The attempt with
the highest number owns the folder. A process becomes the owner when it creates the file with the
next number. Only one process can do this, even on a shared file system. The owner updates the
modification time of its file. An attempt is dead if its process has ended or if it no longer
updates the time. Then the next attempt may take the folder.
"""

import dataclasses
import json
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import psutil

from ..errors import UsageError
from ..filesystem import write_atomically
from ..foreign import open_regular, read_object

if TYPE_CHECKING:
    from ..config import Settings
    from ..ranks.world import World

log = logging.getLogger(__name__)

HEARTBEAT = 20  # seconds between two updates of the file's modification time
SILENCE_LIMIT = 300  # seconds without an update until an attempt on another node counts as dead


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A process that owns, or owned, a run folder.

    Args:
        host: the name of the machine.
        system: the ids of the machine's boot and of the container. A pid is unique within both.
        pid: the process id.
        started: when the process started, in seconds since the boot.
        cluster, job: from Slurm; None without Slurm.
        restart: how often Slurm has requeued the job.
        start: how often the batch script has started the ranks again, since the last requeue.
        ended: whether the attempt has released the folder.
        began: when it took the folder, in seconds since 1970.
        origin: cluster, number and time of submission of the job that the run is named after; "" if
            no batch script says it.
    """

    host: str
    system: str
    pid: int
    started: float
    cluster: str | None
    job: str | None
    restart: int
    start: int = 0
    ended: bool = False
    began: float | int = 0
    origin: str = ""

    @classmethod
    def mine(cls) -> "Attempt":
        """Return a new attempt of this process."""
        system = ""
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
            system = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        return cls(
            host=socket.gethostname(),
            system=system,
            pid=os.getpid(),
            started=psutil.Process().create_time() - psutil.boot_time(),
            cluster=os.environ.get("SLURM_CLUSTER_NAME"),
            job=os.environ.get("SLURM_JOB_ID"),
            restart=int(os.environ.get("SLURM_RESTART_COUNT", 0)),
            start=int(os.environ.get("RESTART_IN_JOB", 0)),
            began=time.time(),
            origin=os.environ.get("RUN_ORIGIN", ""),
        )

    def __str__(self) -> str:
        job = f", job {self.job}" if self.job else ""
        again = f", restart {self.start} in it" if self.start else ""
        return f"process {self.pid} on {self.host}{job}{again}"


@contextmanager
def own_run_folder(settings: "Settings", world: "World") -> Iterator[None]:
    """Reserve the run folder for this training; every rank calls this.

    Raises:
        UsageError: another training owns it, or it can't be written to.
    """
    lock = RunLock(Path(str(settings.run_dir)))
    try:
        if not settings.dry_run:
            world.on_main(lock.acquire)
        yield
    finally:
        lock.release()  # also after a failure of another rank, since rank 0 may own the folder


class RunLock:
    """Reserves a run folder for this process."""

    def __init__(self, run: Path) -> None:
        self.run, self.folder = run, run / "attempts"
        self.path: Path | None = None
        self.released = threading.Event()

    def acquire(self) -> None:
        """Take the folder.

        Raises:
            UsageError: another training owns it, or it can't be written to.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.mine = Attempt.mine()
            self.path = self._take()
        except OSError as error:
            raise UsageError(
                f"can't write to the run folder {self.run}: {error.strerror}; choose another with "
                "--run-dir or --run-root"
            ) from None
        self.thread = threading.Thread(target=self._keep_alive, name="run lock", daemon=True)
        self.thread.start()
        owner = self.path.stat().st_uid
        for path in self.run.iterdir():
            if path.is_symlink() and path.lstat().st_uid != owner:
                raise UsageError(
                    f"{path} is another user's link, and this run would write through it: choose "
                    "another --run-dir"
                )

    def release(self) -> None:
        """Release the folder; remove it if nothing was written to it."""
        if not self.path:
            return
        self.released.set()
        self.thread.join()
        with suppress(OSError):
            if self.path.stem == "1" and os.listdir(self.run) == ["attempts"]:
                self.path.unlink()
                self.folder.rmdir()
                self.run.rmdir()
            else:
                write_atomically(self.path, _text(dataclasses.replace(self.mine, ended=True)))
        self.path = None

    def _take(self) -> Path:
        number = newest(self.folder)
        while True:
            path = self.folder / f"{number}.json"
            owner = _read(path) if number else None
            if number and not _is_dead(path, owner, self.mine):
                stop = f" (scancel {owner.job})" if owner and owner.job else ""
                raise UsageError(
                    f"{self.run} is the run folder of {owner or 'an unknown process'}, last "
                    f"updated {_silence(path):.0f} s ago: wait for its end, stop it{stop}, or "
                    f"choose another --run-dir; only if it is certainly dead, remove {path}"
                )
            number += 1
            path = self.folder / f"{number}.json"
            # Another process may have created this file first. A shared file system may list it
            # late, so the loop tries higher numbers.
            with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                file.write(_text(self.mine))  # creating the file is the one atomic operation
                return path

    def _keep_alive(self) -> None:
        """Update the file's modification time from a thread, also during a long step."""
        assert self.path
        following = self.folder / f"{int(self.path.stem) + 1}.json"
        while not self.released.wait(HEARTBEAT):
            with suppress(OSError):
                os.utime(self.path)
                if following.exists():
                    reason = "this training was silent, and another one has its run folder now"
                    log.error("error: %s (%s): this one ends", reason, following)
                    os._exit(1)


def owner_of(run: Path) -> Attempt | None:
    """Return the running training that owns a run folder, None if there is none."""
    folder = run / "attempts"
    path = folder / f"{newest(folder)}.json"
    with suppress(OSError):
        owner = _read(path)
        return None if _is_dead(path, owner, Attempt.mine()) else owner
    return None


def origin_of(run: Path) -> str:
    """Return the origin of the newest attempt at a run, "" if it has none."""
    folder = run / "attempts"
    number = newest(folder)
    last = _read(folder / f"{number}.json") if number else None
    return last.origin if last else ""


def newest(folder: Path) -> int:
    """Return the number of the newest attempt in `attempts/`, 0 if there is none."""
    stems = [path.stem for path in folder.glob("*.json")]
    return max((int(stem) for stem in stems if stem.isdecimal()), default=0)


def _text(attempt: Attempt) -> str:
    return json.dumps(vars(attempt), indent=2) + "\n"


def _read(path: Path) -> Attempt | None:
    """Return the attempt in a file, None if the file is damaged."""
    for _ in range(20):
        with suppress(ValueError, TypeError):
            return Attempt(**read_object(path, get_type_hints(Attempt)))
        time.sleep(0.1)  # its owner may be writing it at this moment
    return None


def _is_dead(path: Path, owner: Attempt | None, mine: Attempt) -> bool:
    """Return whether an attempt is dead: by its process, by the starts of its job, or by time."""
    if owner:
        if owner.ended:
            return True
        if (owner.host, owner.system) == (mine.host, mine.system):
            with suppress(psutil.NoSuchProcess, ValueError):
                process = psutil.Process(owner.pid)
                started = process.create_time() - psutil.boot_time()
                # A new process may have the same pid.
                same = abs(started - owner.started) < 2
                return not same or process.status() == psutil.STATUS_ZOMBIE
            return True
        jobs = [(each.cluster, each.job, each.origin) for each in (owner, mine)]
        starts = [(each.restart, each.start) for each in (owner, mine)]
        if owner.job and jobs[0] == jobs[1] and starts[0] != starts[1]:
            # Slurm starts a requeued job only after its earlier start has ended or its node is
            # lost. The batch script starts the ranks again only after all of them have ended.
            return starts[0] < starts[1]
    return _silence(path) >= SILENCE_LIMIT


def _silence(path: Path) -> float:
    """Return the seconds since the last update; both times are from the file system's clock."""
    with tempfile.TemporaryFile(dir=path.parent) as probe, open_regular(path) as file:
        return os.fstat(probe.fileno()).st_mtime - os.fstat(file.fileno()).st_mtime
