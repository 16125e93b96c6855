"""The actions of `monitor`."""

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...engine.errors import UsageError, say
from ...engine.foreign import read_object
from ...settings import Settings
from . import jobs
from .flags import Flags
from .records import Record, Records
from .serve import serve as run_server
from .servers import available, binding, server
from .submission import POLL, log_of, own, show, submitted, tail


def start(flags: Flags, options: Sequence[str]) -> int:
    """Submit the servers that do not run yet, and wait until all servers answer."""
    records = open_records(flags)
    experiment = flags.experiment or settings().experiment
    names = flags.names or [name for name in available() if name != "aim-server"]
    for name in names:
        binding(name, flags)  # raises before any server is submitted
    found = [submitted(records, name, experiment, flags.run, flags, options) for name in names]
    return show(records, found)


def stop(flags: Flags, _options: Sequence[str]) -> int:
    """Cancel the servers' jobs and wait until they are gone."""
    records = open_records(flags)
    chosen = matching(records, flags)
    queue = jobs.queue()
    for record in chosen:
        if own(record, queue):
            jobs.cancel(record.job)
    for record in chosen:
        while own(record, jobs.queue()):
            time.sleep(POLL)
        records.remove(record.job)
        say(f"{record.title}, job {record.job}: stopped")
    if not chosen:
        say("there is no server to stop")
    return 0


def restart(flags: Flags, options: Sequence[str]) -> int:
    """Stop servers and start them again. Without `--listen`, they listen as before."""
    records = open_records(flags)
    chosen = matching(records, flags)
    if not chosen:
        raise UsageError("there is no server to restart: run 'monitor start'")
    stop(flags, options)
    found = []
    for old in chosen:
        again = flags
        if not flags.listen:
            certificate, key = flags.certificate or old.certificate, flags.key or old.key
            again = dataclasses.replace(
                flags,
                listen=old.listen,
                certificate=Path(certificate) if certificate else None,
                key=Path(key) if key else None,
            )
        found.append(submitted(records, old.server, old.experiment, old.run, again, options))
    return show(records, found)


def status(flags: Flags, _options: Sequence[str]) -> int:
    """Print a line for each server; remove the records of those whose job is gone."""
    records = open_records(flags)
    queue = jobs.queue()
    rows = [("server", "shows", "job", "state", "node", "port", "time left")]
    for record in matching(records, flags):
        what = (record.server, record.shows, record.job)
        job = own(record, queue)
        if not job:
            records.remove(record.job)
            rows.append((*what, "gone", record.node, "", ""))
            continue
        state = job.state.lower()
        if job.state == "PENDING":
            state += f" ({job.reason})"
        elif job.state == "RUNNING":
            state = "answers" if record.node else "starting"
        port = f"{record.port or ''}{' (socket)' if record.socket else ''}"
        rows.append((*what, state, job.node, port, job.left))
    if len(rows) == 1:
        say("no server runs")
        return 0
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{text:{width}}" for text, width in zip(row, widths, strict=True))
        say("  ".join(cells).rstrip())
    return 0


def url(flags: Flags, _options: Sequence[str]) -> int:
    """Print how to reach the servers that answer."""
    queue = jobs.queue()
    found = [
        each for each in matching(open_records(flags), flags) if each.node and own(each, queue)
    ]
    if not found:
        raise UsageError("no server answers: see 'monitor status', or run 'monitor start'")
    say("\n\n".join(record.directions(socket.gethostname()) for record in found))
    return 0


def logs(flags: Flags, _options: Sequence[str]) -> int:
    """Print the end of the servers' logs; with `--follow`, also the lines that are added."""
    chosen = matching(open_records(flags), flags)
    if not chosen:
        raise UsageError("no server runs: see logs/ for the logs of servers that have ended")
    if flags.follow and len(chosen) > 1:
        raise UsageError(f"--follow shows one log, but {len(chosen)} servers run: name one")
    for record in chosen:
        say(f"==> {record.log}\n{tail(record.log)}")
    if flags.follow:
        follow(chosen[0])
    return 0


def view(flags: Flags, options: Sequence[str]) -> int:
    """Open one run: in its own TensorBoard, or on its page in the experiment's other servers."""
    if len(flags.names) not in (1, 2):
        raise UsageError(
            "view takes the folder of a run, and optionally a server: view RUN_DIR aim"
        )
    run_dir = Path(flags.names[0]).absolute()
    root = run_root(flags)
    if run_dir.parent.parent != root or not run_dir.is_dir():
        raise UsageError(f"{run_dir} is not the folder of a run: name one in {root}/EXPERIMENT")
    ids = run_ids(run_dir)
    names = flags.names[1:] or [name for name in available() if name in ids]
    if not names or (server(names[0]) and names[0] not in ids):
        raise UsageError(
            f"{names[0] if names else 'no server of this project'} does not have that run: it was "
            f"logged to {', '.join(ids) or 'no tracker'}"
        )
    name = names[0]
    records = open_records(flags)
    alone = run_dir.name if name == "tensorboard" else ""
    found = submitted(records, name, run_dir.parent.name, alone, flags, options)
    code = show(records, [found])
    record = records.read(found.job)
    if code == 0 and record and not alone:
        say(f"the run's page is {record.url}{server(name).page(ids[name])}")
    return code


def serve(flags: Flags, _options: Sequence[str]) -> int:
    """Run the server of this job."""
    if "SLURM_JOB_ID" not in os.environ or len(flags.names) != 1:
        raise UsageError("'monitor serve' is for the jobs of servers: use 'monitor start'")
    (name,) = flags.names
    job, job_name = os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NAME"]
    record = Record(
        server=name,
        experiment=flags.experiment or settings().experiment,
        run=flags.run,
        job=job,
        job_name=job_name,
        log=log_of(job_name, job),
        **binding(name, flags),
    )
    return run_server(server(name), record, run_root(flags))


ACTIONS: dict[str, Callable[[Flags, Sequence[str]], int]] = {
    action.__name__: action for action in (start, stop, restart, status, url, logs, view, serve)
}


def settings() -> Settings:
    """Return the settings of a training without flags."""
    return Settings.parse([], prog="monitor")


def run_root(flags: Flags) -> Path:
    """Return the folder of all experiments, absolute."""
    return (flags.run_root or Path(settings().run_root)).absolute()


def open_records(flags: Flags) -> Records:
    """Return the records in the run root; check that this is the project's root."""
    available()
    return Records(run_root(flags))


def matching(records: Records, flags: Flags) -> list[Record]:
    """Return the records of the servers that the flags name; all if they name none."""
    for name in flags.names:
        server(name)
    return [
        record
        for record in records.all()
        if (not flags.names or record.server in flags.names)
        and flags.experiment in (None, record.experiment)
        and flags.run in ("", record.run)
    ]


def run_ids(run_dir: Path) -> dict[str, str]:
    """Return the ids that the trackers gave to a run, by tracker."""
    try:
        return read_object(run_dir / "trackers.json", {})
    except (OSError, ValueError):
        return {}


def follow(record: Record) -> None:
    """Print the lines that are added to a server's log, until its job is gone."""
    try:
        with Path(record.log).open(errors="replace") as file:
            file.seek(0, os.SEEK_END)
            while own(record, jobs.queue()):
                say(file.read(), end="")
                time.sleep(POLL)
            say(file.read(), end="")
    except FileNotFoundError:
        raise UsageError(f"job {record.job} has not started: see 'monitor status'") from None
    except KeyboardInterrupt:
        return
