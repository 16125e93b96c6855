"""Submits jobs one after the other, waits for them, and finds why one failed."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ...engine.errors import UsageError, say
from ...engine.ranks import slurm_commands as slurm

POLL = 2  # seconds between two queries about a job
MINUTES = 15  # time limit of a job, without the time between its signal and the limit
# States of a job that has ended. GONE is ours: some minutes after the end, Slurm forgets the job.
ENDED = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "GONE"}
ENDED |= {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"}
# Slurm's reasons of pending jobs that will never start.
HOPELESS = re.compile(
    "Bad|Invalid|NotAllowed|MaxWallDuration|NeverSatisfied|ReservationDeleted|[Hh]eld"
    "|Partition(Config|Down|Inactive|NodeLimit|TimeLimit)"
)
LABEL = re.compile(r"^\d+: (\d\d:\d\d:\d\d \[rank \d+\] )?")  # from srun, and from a rank's log
NOISE = re.compile(r"srun: |slurmstepd: |scancel: |\s*$")
ERROR = re.compile(
    r"error:? |the first rank that failed|stopped after a checkpoint|\S+ +FAILED |[\w.]*Error\b"
    r"|\S+: line \d+: "  # of bash
)


class Failure(Exception):
    """A check failed. The message has the reason, and `log` has the last lines of the job's log."""

    def __init__(self, why: str, log: str = "") -> None:
        super().__init__(why)
        self.log = log


class Interrupted(Exception):
    """A signal ended the checks. The argument is its number."""


@dataclass
class Job:
    """The id and the log of a submitted job."""

    id: str
    log: Path

    def said(self) -> str:
        """Return the text of the log, or "" if it can't be read."""
        with suppress(OSError):
            return self.log.read_text("utf-8", "replace")
        return ""


class Jobs:
    """The jobs of this process. They run one after the other.

    Args:
        patience: time limit of a job in seconds, including its time in the queue.
        log: path of the logs, with %j for the id of the job.

    Attributes:
        running: the jobs that may not have ended yet.
        all: all jobs that were submitted.
    """

    def __init__(self, patience: float, log: str) -> None:
        self.patience, self.log, self.signal = patience, log, 0
        self.running: list[Job] = []
        self.all: list[Job] = []

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: the next `check` raises Interrupted."""
        self.signal = number

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.signal:
            raise Interrupted(self.signal)

    def submit(
        self, script: str, *arguments: str, options: tuple[str, ...] = (), env: str = ""
    ) -> Job:
        """Submit a script with at most two nodes and a short time limit.

        Raises:
            Failure: Slurm refuses it.
            Interrupted: a signal came.
        """
        self.check()
        few = smallest(Path(script).read_text("utf-8"))
        variables = dict([env.split("=")]) if env else {}
        command = (
            "sbatch",
            "--parsable",
            f"--output={self.log}",
            *few,
            *options,
            script,
            *arguments,
        )
        done = slurm.run(*command, **variables)
        if done.returncode:
            raise Failure(f"sbatch refuses {script}: {slurm.said(done)}")
        number = re.search(r"^(\d+)(;\S+)?\s*\Z", done.stdout, re.M)  # a cluster may follow
        if not number:
            raise Failure(f"sbatch printed {done.stdout.strip()!r}: expected the id of a job")
        job = Job(number[1], Path(self.log.replace("%j", number[1])))
        self.running.append(job)
        self.all.append(job)
        return job

    def wait(
        self, job: Job, until: Callable[[dict[str, str]], object] = lambda _: False
    ) -> dict[str, str]:
        """Wait until a job has ended or `until` is true; return what scontrol shows about it.

        Raises:
            Failure: it will never start, or takes too long.
            Interrupted: a signal came.
        """
        deadline, shown = time.monotonic() + self.patience, False
        while True:
            facts = self._ask(job)
            state, reason = facts.get("JobState", ""), facts.get("Reason", "")
            if state in ENDED:
                self.running.remove(job)
                return facts
            if until(facts):
                return facts
            said = f"job {job.id} is {state} ({reason})" if state else "Slurm does not answer"
            if state == "PENDING" and HOPELESS.search(reason):
                raise Failure(f"{said}, and will never start")
            if time.monotonic() > deadline:
                raise Failure(
                    f"{said} after {self.patience / 60:.3g} minutes: set a larger --wait", tail(job)
                )
            if state == "PENDING" and reason not in ("", "None") and not shown:
                say(f"    {said}")
                shown = True
            self.check()
            time.sleep(POLL)

    def finish(self, job: Job) -> None:
        """Wait until a job has completed.

        Raises:
            Failure: it ended in another state.
        """
        facts = self.wait(job)
        if facts["JobState"] != "COMPLETED":
            raise failure(job, facts)

    def cancel(self) -> None:
        """Cancel the jobs that have not ended; wait at most a minute for their end."""
        for job in self.running:
            with suppress(UsageError):
                slurm.run("scancel", job.id)
        until = time.monotonic() + 60
        while self.running and time.monotonic() < until:
            ended = [job for job in self.running if self._ask(job).get("JobState", "") in ENDED]
            self.running = [job for job in self.running if job not in ended]
            time.sleep(POLL * bool(self.running))

    def _ask(self, job: Job) -> dict[str, str]:
        done = None
        with suppress(UsageError):  # Slurm is busy
            done = slurm.run("scontrol", "show", "job", "--oneliner", job.id)
        if not done:
            return {}
        if done.returncode and "Invalid job id" in done.stderr:
            return {"JobState": "GONE"}
        return dict(re.findall(r"(\S+?)=(\S*)", done.stdout))


def smallest(script: str) -> list[str]:
    """Return the options of sbatch that limit a script to two nodes and a short time."""

    def asked(option: str) -> re.Match[str] | None:
        return re.search(rf"^#SBATCH --{option}$", script, re.M)

    options, lead, limit = [], asked(r"signal=\w+@(\d+)"), asked(r"time=(\S+)")
    least = MINUTES + (int(lead[1]) + 59) // 60 if lead else MINUTES
    if not limit or minutes(limit[1]) > least:
        options += [f"--time={least}"]
    if (nodes := asked(r"nodes=(\d+)")) and int(nodes[1]) > 2:
        options += ["--nodes=2"]
        if gpus := asked(r"(gpus=(?:\S+:)?)(\d+)"):
            options += [f"--{gpus[1]}{2 * int(gpus[2]) // int(nodes[1])}"]
    return options


def minutes(limit: str) -> float:
    """Return the minutes of a time limit in any of Slurm's formats."""
    if not limit[:1].isdigit():  # UNLIMITED
        return float("inf")
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in f"{rest}:0".split(":")]
    if dash:
        return 24 * 60 * int(days) + 60 * parts[0] + parts[1]
    return 60 * parts[0] + parts[1] if rest.count(":") == 2 else parts[0]


def failure(job: Job, facts: dict[str, str]) -> Failure:
    """Return why a job failed: the first error in its log, else the last line."""
    lines = [LABEL.sub("", line) for line in job.said().splitlines()]
    lines = [line for line in lines if not NOISE.match(line)]
    nothing = "its log is empty" if job.log.exists() else "it wrote no log"
    error = next(filter(ERROR.match, lines), (lines or [nothing])[-1])
    state = f"{facts['JobState']}, exit code {facts.get('ExitCode', '?')}"
    return Failure(f"{' '.join(error.split())} ({state}; {job.log})", tail(job))


def tail(job: Job) -> str:
    """Return the last lines of a job's log."""
    return "\n".join(job.said().splitlines()[-40:])
