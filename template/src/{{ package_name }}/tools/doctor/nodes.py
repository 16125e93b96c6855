"""Nodes of one job compared: do they share a folder, reach each other, and agree?

Each process leaves its findings in a fresh folder in the run root, and sends them to the first
over TCP. What arrives in one way and not in the other tells what is wrong.
"""

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from ...core.errors import UsageError
from ...core.ranks.environment import Ranks, rendezvous_address
from . import locks
from .findings import Finding, attempt

MUST_AGREE = ("python", "torch")
# Seconds. Beyond the first, what nodes log is out of order; before clocks are five minutes apart,
# Slurm's authentication (munge) and Kerberos refuse each other's credentials.
CLOCK_WARNING, CLOCK_ERROR = 1, 60
# Seconds that a file may take to appear here, once its node has said that it is written.
FILE_DELAY = 10

Look = Callable[[], Iterable[Finding]]
Report = dict[str, Any]


def compare(
    root: Path, ranks: Ranks, timeout: float, look: Look, databases: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield what `look` finds on each node, and what the nodes are to each other.

    Args:
        root: the folder that nodes must share.
        timeout: seconds that the first process waits for the others after its own checks.
        databases: trackers with files that nodes must lock for each other (`locks.seen`).

    Only the first process yields anything.
    """
    folder = root / f".doctor-{_token(ranks)}"
    if folder.exists() and folder.lstat().st_uid != os.getuid():
        raise UsageError(f"{folder} is another user's: choose another --run-root, or submit again")
    if ranks.rank:
        _tell(folder, ranks, timeout, look, databases)
        return
    in_job = ranks.size > 1 or "SLURM_JOB_ID" in os.environ
    door = Door(folder)
    try:
        if in_job:
            yield from attempt("port", door.open)
        own = chain(look(), _writable(folder))
        if ranks.size == 1:
            yield from own
        else:
            with locks.held(folder):
                yield from _hear(folder, ranks, timeout, list(own), door)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        door.close()  # which lets the others go


def _token(ranks: Ranks) -> str:
    """Return a name that the processes of this start share, and no others."""
    if ranks.size == 1:
        return f"{socket.gethostname()}-{os.getpid()}"
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return "-".join(os.environ.get(name, "0") for name in names)


# The first process


class Door:
    """Where the first process listens, at the port on which ranks meet.

    Args:
        folder: where others shall leave what they found.

    Attributes:
        hosts: the hostname of each process that came, by rank.
        reports: what it found, later; heard: when the last report came, by the monotonic clock.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: dict[int, str] = {}
        self.reports: dict[int, Report] = {}
        self.heard = 0.0
        self._sockets: list[socket.socket] = []

    def open(self) -> Iterator[Finding]:
        """Start to listen."""
        address = rendezvous_address({"MASTER_ADDR": socket.gethostname(), **os.environ})
        port = int(address.rpartition(":")[2])
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
        except OSError as error:
            raise UsageError(
                f"port {port}, on which ranks meet, can't be had ({error.strerror}): submit "
                "again, since each job has a port of its own, or export MASTER_PORT in "
                "slurm/site.sh"
            ) from None
        self._sockets.append(listener)
        threading.Thread(target=self._listen, args=(listener,), daemon=True).start()
        yield Finding("ok", "port", f"{port} is free")

    def _listen(self, listener: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                guest, _ = listener.accept()
                self._sockets.append(guest)
                threading.Thread(target=self._receive, args=(guest,), daemon=True).start()

    def _receive(self, guest: socket.socket) -> None:
        with suppress(OSError, ValueError), guest.makefile("rw", encoding="utf-8") as stream:
            _write(stream, {"time": time.time(), "folder": str(self.folder)})
            hello = json.loads(stream.readline())
            self.hosts[hello["rank"]] = hello["host"]
            report = json.loads(stream.readline())
            self.heard = time.monotonic()
            self.reports[hello["rank"]] = report
            stream.readline()  # until either end closes

    def close(self) -> None:
        """Stop listening, and close all connections."""
        for each in self._sockets:
            with suppress(OSError):  # it may be closed at the other end
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _hear(
    folder: Path, ranks: Ranks, timeout: float, own: Sequence[Finding], door: Door
) -> Iterator[Finding]:
    """Wait for the other processes, and yield what all found."""
    reports = {0: _report(own)}
    missing = set(range(1, ranks.size))
    end = time.monotonic() + timeout
    while missing and time.monotonic() < end:
        # A network file system shows a folder as it was up to a minute ago, unless this node
        # itself changes it.
        with suppress(OSError):
            (folder / "look").touch()
            (folder / "look").unlink()
        for rank in missing:
            with suppress(OSError):
                reports[rank] = json.loads(_file(folder, rank).read_text(encoding="utf-8"))
        # Who says that it could not write need not be waited for.
        told = dict(door.reports)
        reports |= {rank: each for rank, each in told.items() if not each["written"]}
        missing -= set(reports)
        if missing <= set(told):  # only files have not come
            end = min(end, door.heard + FILE_DELAY)
        time.sleep(0.2)
    reports = {**door.reports, **reports}
    yield from merge([reports[rank] for rank in sorted(reports)])
    for rank in sorted(missing):
        yield _absent(rank, folder.parent, timeout, door)
    if not missing and all(report["written"] for report in reports.values()):
        message = f"{folder.parent}: what {ranks.size} processes wrote came to the first"
        yield Finding("ok", "shared folder", message)


def _absent(rank: int, root: Path, timeout: float, door: Door) -> Finding:
    """Return what it means that a process's file did not come."""
    host = door.hosts.get(rank)
    if rank in door.reports:
        message = (
            f"what this node wrote in {root} did not come to the first node: set run_root to a "
            "folder that all nodes share"
        )
    elif host:
        message = f"rank {rank} came, but was not done after {timeout:g} s: raise --timeout"
    else:
        nodelist = os.environ.get("SLURM_STEP_NODELIST", "the job")
        message = (
            f"rank {rank} of {nodelist} neither connected nor left a file in {root} within "
            f"{timeout:g} s: is its node alive, and does Python start there?"
        )
    return Finding("error", "shared folder", message, (host,) if host else ())


def merge(reports: Sequence[Report]) -> Iterator[Finding]:
    """Yield each finding once, with its nodes where it does not hold for all."""
    found: dict[str, dict[Finding, list[str]]] = {}
    for report in reports:
        for finding in (Finding(*words) for words in report["findings"]):
            where = found.setdefault(finding.name, {}).setdefault(finding, [])
            if report["host"] not in where:
                where.append(report["host"])
    everywhere = len({report["host"] for report in reports})
    for name, findings in found.items():
        if name in MUST_AGREE and len(findings) > 1 and {f.status for f in findings} == {"ok"}:
            each = (f"{finding.message} on {', '.join(w)}" for finding, w in findings.items())
            yield Finding("error", name, f"nodes must agree, but this is {'; '.join(each)}")
            continue
        for finding, where in findings.items():
            yield replace(finding, nodes=() if len(where) == everywhere else tuple(where))


# The other processes


def _tell(
    folder: Path, ranks: Ranks, timeout: float, look: Look, databases: Mapping[str, str]
) -> None:
    """Look, leave what was found in the folder, tell it to the first process, wait for its end."""
    door, greeted, wanted = _knock(ranks, timeout)
    folder = wanted or folder  # where settings can't be read, this node does not know it
    found = [*greeted, *look(), *_writable(folder)]
    if databases:
        found += locks.seen(folder, databases)
    report = _report(found)
    file = _file(folder, ranks.rank)
    try:
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(report), encoding="utf-8")
        fresh.replace(file)
    except OSError:
        report["written"] = False  # and `_writable` has said why
    if door:
        with suppress(OSError), door.makefile("rw", encoding="utf-8") as stream:
            _write(stream, report)
            stream.readline()  # until the first process closes
        door.close()
    else:
        deadline = time.monotonic() + 3 * timeout
        while file.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
    # Where the folder is not shared, nobody else removes it.
    with suppress(OSError):
        file.unlink(missing_ok=True)
        folder.rmdir()


def _knock(ranks: Ranks, timeout: float) -> tuple[socket.socket | None, list[Finding], Path | None]:
    """Connect to the first process; return the connection, findings, and the folder it names.

    Without a connection, it and the folder are None.
    """
    try:
        address = rendezvous_address(os.environ)
    except UsageError as error:
        return None, [Finding("error", "first node", str(error))], None
    host, _, port = address.rpartition(":")
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        message = f"its name {host} does not resolve ({error}): tell your administrators"
        return None, [Finding("error", "first node", message)], None
    deadline = time.monotonic() + timeout / 2  # the first waits that long for the rest, too
    while True:
        try:
            before = time.time()
            door = socket.create_connection((host, int(port)), timeout=5)
            with door.makefile("rw", encoding="utf-8") as stream:
                greeting = json.loads(stream.readline())
                after = time.time()
                _write(stream, {"rank": ranks.rank, "host": socket.gethostname()})
            door.settimeout(None)
            break
        except (OSError, ValueError) as error:  # nobody there yet, or somebody else
            if time.monotonic() > deadline:
                message = (
                    f"{address} can't be reached ({error}): is there a firewall? Choose another "
                    "network with GLOO_SOCKET_IFNAME in slurm/site.sh, or ask your administrators"
                )
                return None, [Finding("error", "first node", message)], None
            time.sleep(0.5)
    found = Finding("ok", "first node", f"{address} can be reached")
    clock = _clock("the first node", greeting["time"], before, after)
    return door, [found, *clock], Path(greeting["folder"])


# Both


def _write(stream: Any, value: Mapping[str, Any]) -> None:  # noqa: ANN401 - a text stream
    stream.write(json.dumps(value) + "\n")
    stream.flush()


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def _report(findings: Iterable[Finding]) -> Report:
    words = [[each.status, each.name, each.message] for each in findings]
    return {"host": socket.gethostname(), "findings": words, "written": True}


def _writable(folder: Path) -> Iterator[Finding]:
    """Write a file, and see what time it is where it was stored."""
    root = folder.parent
    probe = folder / f"{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = time.time()
        probe.write_text("Is the folder writable?", encoding="utf-8")
        after = time.time()
        theirs = probe.stat().st_mtime
        probe.unlink()
    except OSError as error:
        message = f"{root} can't be written ({error.strerror}): set run_root to a folder of yours"
        yield Finding("error", "run folder", message)
        return
    yield Finding("ok", "run folder", f"{root} can be written")
    yield from _clock(f"the file server of {root}", theirs, before, after)


def _clock(whose: str, theirs: float, before: float, after: float) -> Iterator[Finding]:
    """Compare a time that was taken elsewhere, between `before` and `after` here; in seconds."""
    apart = max(before - theirs, theirs - after, 0)
    if apart < CLOCK_WARNING:
        yield Finding("ok", "clock", f"agrees with {whose}")
        return
    message = (
        f"is {apart:.0f} s {'ahead of' if theirs < before else 'behind'} {whose}: logs get out of "
        "order, and minutes apart Slurm refuses credentials: tell your administrators"
    )
    yield Finding("error" if apart >= CLOCK_ERROR else "warning", "clock", message)
