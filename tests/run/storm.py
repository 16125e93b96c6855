"""Hits a training at random moments, in each way that a cluster has, and starts it again."""

import mmap
import random
import signal
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from .conftest import PATIENCE, Job

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LAYOUT = struct.Struct("qqq1000s")  # of struct faults in faults.c
ERRORS = {"ENOSPC": 28, "EDQUOT": 122, "EIO": 5}


class Faults:
    """What fails for processes that have its environment: the disk below a folder, and the clock.

    Args:
        library: of `compile_faults`.
        folder: for a file of its own.

    Attributes:
        environment: what such a process is started with.
        below: the folder of the files.
    """

    def __init__(self, library: Path, folder: Path) -> None:
        self.below = folder
        path = folder / "faults"
        path.write_bytes(bytes(LAYOUT.size))
        with path.open("r+b") as file:
            self.memory = mmap.mmap(file.fileno(), LAYOUT.size)
        self.environment = {"LD_PRELOAD": str(library), "FAULTS": str(path)}

    def set(self, error: int = 0, microseconds: int = 0, seconds: int = 0) -> None:
        """Fail with an errno, delay each write, or advance the clock, from now on."""
        self.memory[:] = LAYOUT.pack(error, microseconds, seconds, f"{self.below}/".encode())


def compile_faults(folder: Path) -> Path:
    """Return the compiled library of faults.c."""
    library = folder / "faults.so"
    options = ("-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC")
    source = Path(__file__).with_name("faults.c")
    subprocess.run(["gcc", *options, "-o", library, source], check=True)
    return library


class Storm:
    """Starts a training, hits it, and starts it again until it ends by itself.

    Args:
        start: starts the training, or goes on with it.
        seconds: that it takes.
        chance: the random numbers.
        faults: to hit the disk and the clock as well.

    Attributes:
        told: what was done, and what came of it, one line for each.
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
        """Hit the training so many times, or until it has ended well; return it, and what is left.

        Where all hits were made, it goes on untouched, and must end well at once.
        """
        while times:
            job = self.start()
            family: set[psutil.Process] = set()
            try:
                while times and self._comes_to_a_moment(job):
                    times -= 1
                    family |= set(members(job))
                    self._hit(job, self.chance.choice(sorted(family, key=lambda each: each.pid)))
                job.wait()
            finally:
                if self.faults:
                    self.faults.set()
                job.kill()
            _, left = psutil.wait_procs(family, PATIENCE)
            assert not left, f"left behind: {left}\n{self}\n{job.log}"
            self.ends[tuple(job.codes)] += 1
            self.told.append(f"  ended with {job.codes}")
            # TensorBoard's own thread shows why it could not write.
            assert self.faults or "Traceback" not in job.log, f"{self}\n{job.log}"
            if not any(job.codes):
                return job, times
        return self.start().wait(), 0

    def _comes_to_a_moment(self, job: Job) -> bool:
        """Wait for a step or, now and then, for a time; return False if it ends before."""
        if self.chance.random() < 0.3:
            return not self._ended(job, self.chance.uniform(0, self.seconds))
        before = step_of(job)
        step = before + self.chance.randrange(1, 30)
        while step_of(job) < step:
            if self._ended(job, 0.01):
                return False
        return True

    def _ended(self, job: Job, seconds: float) -> bool:
        """Wait so long; return whether a rank, or what started it, has ended before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if any(process.poll() is not None for process in job.processes):
                return True
            time.sleep(0.01)
        return False

    def _hit(self, job: Job, one: psutil.Process) -> None:
        kinds = [self._signal, self._stop]
        if self.faults:
            kinds += [self._fail, self._fail, self._delay, self._jump]
        self.chance.choice(kinds)(job, one)

    def _signal(self, job: Job, one: psutil.Process) -> None:
        number = self.chance.choice(SIGNALS)
        rank = psutil.Process(self.chance.choice(job.processes).pid)
        targets = {"one process": [one], "a rank": [rank], "all processes": members(job)}
        name = self.chance.choice(list(targets))
        self._tell(job, f"{number.name} to {name}")
        for process in targets[name]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _stop(self, job: Job, one: psutil.Process) -> None:
        seconds = self.chance.uniform(0, 1.5)
        self._tell(job, f"STOP to {one.pid} for {seconds:.2f} s")
        with suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            one.send_signal(signal.SIGCONT)

    def _fail(self, job: Job, _one: psutil.Process) -> None:
        name = self.chance.choice(list(ERRORS))
        seconds = self.chance.choice([0.1, 1, 1000])
        self._tell(job, f"{name} for {seconds} s")
        self.faults.set(error=ERRORS[name])
        if not self._ended(job, min(seconds, self.seconds * 2)) and seconds < 1000:
            self.faults.set()

    def _delay(self, job: Job, _one: psutil.Process) -> None:
        self._tell(job, "each write takes 20 ms longer")
        self.faults.set(microseconds=20_000)

    def _jump(self, job: Job, _one: psutil.Process) -> None:
        seconds = self.chance.choice([-86_400, -3, 3, 86_400])
        self._tell(job, f"the clock jumps by {seconds} s")
        self.faults.set(seconds=seconds)

    def _tell(self, job: Job, what: str) -> None:
        self.told.append(f"{what}, at step {step_of(job)}")

    def __str__(self) -> str:
        return "\n".join(self.told)


def step_of(job: Job) -> int:
    """Return the last step that was logged, 0 if none was."""
    lines = job.metrics()
    return lines[-1]["step"] if lines else 0


def members(job: Job) -> list[psutil.Process]:
    """Return the processes that were started, and all that they have started and that run."""
    found = []
    for process in job.processes:
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(process.pid)
            found += [first, *first.children(recursive=True)]
    return [each for each in found if each.is_running()]
