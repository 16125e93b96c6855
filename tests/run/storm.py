"""Disturbs a training at random moments, in all ways that happen on a cluster, and restarts it."""

import mmap
import random
import re
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import compiler
import metrics
import psutil

from .conftest import PATIENCE, Job

SOURCE = Path(__file__).with_name("faults.c")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LAYOUT = struct.Struct("qqq1000s")  # of struct faults in faults.c
# Python's resource tracker: after it was killed, Python starts a new one, which prints this.
TRACKER_WAS_KILLED = re.compile(
    r'Traceback .*\n  File ".*/multiprocessing/resource_tracker\.py".*\n(?: .*\n)*\w.*\n'
)
ERRORS = {"ENOSPC": 28, "EDQUOT": 122, "EIO": 5}


class Faults:
    """Makes the disk below a folder and the clock fail, for processes with its environment.

    Args:
        folder: folder for files of this object.

    Attributes:
        environment: environment variables for such a process.
        below: the folder whose files fail.
    """

    def __init__(self, folder: Path) -> None:
        self.below = folder
        path = folder / "faults"
        path.write_bytes(bytes(LAYOUT.size))
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), LAYOUT.size)
        self.environment = {"LD_PRELOAD": str(compiler.build(SOURCE, folder)), "FAULTS": str(path)}

    def set(self, error: int = 0, microseconds: int = 0, seconds: int = 0) -> None:
        """From now on, fail with an errno, delay each write, or advance the clock."""
        self.memory[:] = LAYOUT.pack(error, microseconds, seconds, f"{self.below}/".encode())


class Storm:
    """Starts a training, disturbs it, and starts it again until it finishes.

    Args:
        start: starts or resumes the training.
        seconds: duration of the training.
        chance: source of random numbers.
        faults: if given, disturb the disk and the clock too.

    Attributes:
        told: a line for each disturbance and its result.
        ends: how often the training ended with which exit codes.
    """

    def __init__(
        self,
        start: Callable[[], Job],
        seconds: float,
        chance: random.Random,
        faults: Faults | None = None,
    ) -> None:
        self.start, self.seconds, self.chance, self.faults = start, seconds, chance, faults
        self.told: list[str] = []
        self.ends: Counter[tuple[int, ...]] = Counter()

    def hit(self, times: int) -> tuple[Job, int]:
        """Disturb the training so many times, or until it has finished.

        After the last disturbance, the training continues, and must finish.

        Returns:
            The last job, and how many disturbances are left.
        """
        while times:
            job = self.start()
            family: set[psutil.Process] = set()
            try:
                while times and self._comes_to_a_moment(job):
                    times -= 1
                    family |= set(job.family())
                    with suppress(psutil.NoSuchProcess):  # it has just ended
                        self._hit(job, family)
                job.wait()
            except AssertionError as error:
                raise AssertionError(f"{self}\n{error}") from None
            finally:
                if self.faults:
                    self.faults.set()
                job.kill()
            _, left = psutil.wait_procs(family, PATIENCE)
            assert not left, f"left behind: {left}\n{self}\n{job.log}"
            self.ends[tuple(job.codes)] += 1
            self.told.append(f"  ended with {job.codes}")
            # TensorBoard's own thread prints a traceback if it can't write.
            shown = TRACKER_WAS_KILLED.sub("", job.log)
            assert self.faults or "Traceback" not in shown, f"{self}\n{job.log}"
            if not any(job.codes):
                return job, times
        return self.start().wait(), 0

    def _comes_to_a_moment(self, job: Job) -> bool:
        """Wait for a step or, sometimes, for a time; return False if the training ends before."""
        if self.chance.random() < 0.3:
            return not self._ended(job, self.chance.uniform(0, self.seconds))
        before = metrics.last_step(job.run_dir)
        step = before + self.chance.randrange(1, 30)
        while metrics.last_step(job.run_dir) < step:
            if self._ended(job, 0.01):
                return False
        return True

    def _ended(self, job: Job, seconds: float) -> bool:
        """Wait for some seconds; return whether a rank or its launcher has ended before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in job.processes):
                return True
            time.sleep(0.01)
        return False

    def _hit(self, job: Job, family: set[psutil.Process]) -> None:
        rank = psutil.Process(self.chance.choice(job.processes).pid)
        one = self.chance.choice(sorted(family, key=lambda each: each.pid) or [rank])
        kinds = [self._signal, self._stop]
        if self.faults:
            kinds += [self._fail, self._fail, self._delay, self._jump]
        self.chance.choice(kinds)(job, one, rank)

    def _signal(self, job: Job, one: psutil.Process, rank: psutil.Process) -> None:
        number = self.chance.choice(SIGNALS)
        targets = {"one process": [one], "a rank": [rank], "all processes": job.family()}
        name = self.chance.choice(list(targets))
        self._tell(job, f"{number.name} to {name}")
        for process in targets[name]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _stop(self, job: Job, one: psutil.Process, _rank: psutil.Process) -> None:
        seconds = self.chance.uniform(0, 1.5)
        self._tell(job, f"STOP to {one.pid} for {seconds:.2f} s")
        one.suspend()
        time.sleep(seconds)
        one.resume()

    def _fail(self, job: Job, *_: psutil.Process) -> None:
        name = self.chance.choice(list(ERRORS))
        seconds = self.chance.choice([0.1, 1, 1000])
        self._tell(job, f"{name} for {seconds} s")
        self.faults.set(error=ERRORS[name])
        if not self._ended(job, min(seconds, self.seconds * 2)) and seconds < 1000:
            self.faults.set()

    def _delay(self, job: Job, *_: psutil.Process) -> None:
        self._tell(job, "each write takes 20 ms longer")
        self.faults.set(microseconds=20_000)

    def _jump(self, job: Job, *_: psutil.Process) -> None:
        seconds = self.chance.choice([-86_400, -3, 3, 86_400])
        self._tell(job, f"the clock jumps by {seconds} s")
        self.faults.set(seconds=seconds)

    def _tell(self, job: Job, what: str) -> None:
        self.told.append(f"{what}, at step {metrics.last_step(job.run_dir)}")

    def __str__(self) -> str:
        return "\n".join(self.told)
