"""Submits the job of a server, and waits until the server answers."""

import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...engine.errors import UsageError, printable_lines, say
from ...engine.foreign import read_bytes
from . import jobs
from .flags import Flags
from .records import Record, Records
from .servers import binding, script

POLL = 2  # seconds between two queries of the queue


def submitted(
    records: Records,
    name: str,
    experiment: str,
    run: str,
    flags: Flags,
    options: Sequence[str],
) -> Record:
    """Return the record of a server; submit its job unless the job waits or runs already.

    Raises:
        UsageError: the server does not support the flags, or runs with another --listen, or Slurm
            refuses its job.
    """
    bound = binding(name, flags)
    with records.locked():
        queue = jobs.queue()
        for record in records.all():
            same = (record.server, record.experiment, record.run) == (name, experiment, run)
            if same and own(record, queue):
                if flags.listen not in (None, record.listen):
                    raise UsageError(
                        f"{record.title} runs with --listen {record.listen}, job {record.job}: "
                        f"run 'monitor restart {name} --listen {flags.listen}'"
                    )
                say(f"{record.title} runs already, job {record.job}")
                return record
        job_name = f"{__package__.partition('.')[0]}-{name}"
        # These options come last, because sbatch uses the last value of an option.
        own_options = [f"--job-name={job_name}", "--output=logs/%x-%j.out"]
        arguments = [f"--run-root={records.folder.parent}", f"--experiment={experiment}"]
        arguments += [f"--run={run}", *(f"--{flag}={value}" for flag, value in bound.items())]
        job = jobs.submit([*options, *own_options], script(name), arguments)
        record = Record(
            server=name,
            experiment=experiment,
            run=run,
            job=job,
            job_name=job_name,
            log=log_of(job_name, job),
            **bound,
        )
        records.write(record, create=False)
    say(f"{record.title}: submitted as job {job}")
    return record


def show(records: Records, found: Sequence[Record]) -> int:
    """Wait until servers answer, and print how to reach each; return 130 after Ctrl-C.

    Raises:
        UsageError: a job ended first; the end of its log is printed.
    """
    for record in found:
        try:
            answering = wait(records, record)
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would interrupt the rest
            say(f"\njob {record.job} stays in the queue: see 'monitor status'")
            return 130
        say(f"\n{answering.directions(socket.gethostname())}\n")
    return 0


def wait(records: Records, record: Record) -> Record:
    """Wait until a server answers and return its record; print what it waits for.

    Raises:
        UsageError: the job ended first; the end of its log is printed.
    """
    said = ""
    while True:
        # Ask Slurm first: a job that is in the queue has not removed its record yet.
        job = own(record, jobs.queue())
        current = records.read(record.job)
        if not job or job.state == "COMPLETING":
            print(printable_lines(tail(record.log)), file=sys.stderr)
            records.remove(record.job)
            raise UsageError(
                f"job {record.job} ended before {record.title} answered: see its output above "
                f"and in {record.log}"
            )
        if current and current.node:
            return current
        news = f"job {job.id} is on {job.node}, and its server is starting"
        if job.state == "PENDING":
            news = f"job {job.id} waits ({job.reason}); Ctrl-C leaves it in the queue"
        if news != said:
            say(news)
        said = news
        time.sleep(POLL)


def own(record: Record, queue: Mapping[str, jobs.Job]) -> jobs.Job | None:
    """Return a server's job, or None if it has ended or if another job has its id now."""
    job = queue.get(record.job)
    return job if job and job.name == record.job_name else None


def log_of(job_name: str, job: str) -> str:
    """Return the file that a server's job writes to."""
    return str(Path("logs", f"{job_name}-{job}.out").absolute())


def tail(log: str, lines: int = 20) -> str:
    """Return the end of a log."""
    try:
        text = read_bytes(Path(log), 2**16, last=True).decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])
    except FileNotFoundError:
        return "(no log yet: the job has not started)"
