"""What one node has, and how the nodes of a job differ.

slurm/doctor.sbatch starts `doctor --nodes=report` on each node, which prints a report as a line of
JSON. `doctor --nodes=compare` on the first node reads the reports and compares them.
"""

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...engine.errors import say
from . import software
from .findings import Finding, Status, attempt
from .scripts import Script

if TYPE_CHECKING:
    from ...settings import Settings

GIB = 2**30
# What it means if nodes differ in it.
DIFFERENCES: dict[str, Status] = {"python": "error", "torch": "error", "GPUs": "warning"}
# Seconds. A report may take a moment to arrive, so a smaller difference can't be told. If clocks
# differ by minutes, Slurm's authentication (munge) and Kerberos refuse credentials.
CLOCK_WARNING, CLOCK_ERROR = 5, 60
FILE_DELAY = 30  # seconds that a new file may take to appear on another node
# Trackers with a database in the run root, unless this variable names a server.
DATABASES = {"aim": "AIM_REPO", "mlflow": "MLFLOW_TRACKING_URI"}

Report = dict[str, Any]


def count() -> int:
    """Return how many nodes the job has; 1 outside of jobs."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)


def check(settings: "Settings | None", jobs: Sequence[Script]) -> Iterator[Finding]:
    """Check this node: software, GPUs, dataset, run root, network."""
    yield from attempt("python", software.python)
    yield from attempt("packages", software.packages)
    yield from attempt("torch", software.pytorch, settings, jobs)
    if settings:
        yield from attempt("dataset", _dataset, settings)
    root = Path(settings.run_root if settings else ".")
    yield from attempt("run folder", _run_root, root, settings)
    yield from attempt("space", _space, root)
    yield from attempt("network", _network, os.environ)


def _dataset(settings: "Settings") -> Iterator[Finding]:
    """Load the dataset as every rank does, and count its samples."""
    from ...data import load

    datasets = load(settings)
    sizes = []
    for part in ("train", "validation", "test"):
        samples = getattr(datasets, part)
        sizes.append(f"{part} {len(samples) if hasattr(samples, '__len__') else 'of no length'}")
    yield Finding("ok", "dataset", f"{settings.dataset}: {', '.join(sizes)}")


def _run_root(root: Path, settings: "Settings | None") -> Iterator[Finding]:
    """Write a file, lock it, and compare the clock with the file server's."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=root, prefix=".doctor-") as file:
            before = time.time()
            file.write("Can files be written here?")
            file.flush()
            stored, after = os.stat(file.name).st_mtime, time.time()
            locked = _lock(file)
    except OSError as error:
        message = f"{root} can't be written ({error.strerror}): set run_root to a folder of yours"
        yield Finding("error", "run folder", message)
        return
    yield Finding("ok", "run folder", f"{root} can be written")
    apart = before - stored if stored < before else min(after - stored, 0)
    yield _clock(f"the file server of {root}", apart)
    if locked and (trackers := _databases(settings)):
        yield Finding("error", "locks", f"files in {root} can't be locked ({locked}), {trackers}")


def _lock(file: IO) -> str:
    """Lock an open file until it is closed; return why that failed, or an empty string."""
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        return ""
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _databases(settings: "Settings | None") -> str:
    """Return which trackers need locks in the run root, and what to do; empty if none does."""
    from ...trackers import select

    names = []
    for name in select(settings.trackers) if settings else ():
        server = os.environ.get(DATABASES.get(name, ""), "")
        if name in DATABASES and not server.startswith(("http://", "https://", "aim://")):
            names.append(name)
    if not names:
        return ""
    return (
        f"which the database of {' and '.join(names)} needs: choose --run-root on another file "
        f"system, or name a server in {' and '.join(DATABASES[name] for name in names)}"
    )


def _space(run_root: Path) -> Iterator[Finding]:
    """Check that there is room for checkpoints, temporary files and shared memory."""
    folders = (run_root, Path(tempfile.gettempdir()), Path("/dev/shm"))
    full = []
    for folder in folders:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if (free := shutil.disk_usage(there).free) < GIB:
            full.append(f"{folder} has {free // 2**20} MiB free")
    if full:
        message = f"{', '.join(full)}: checkpoints and loading workers need more"
        yield Finding("warning", "space", message)
    else:
        yield Finding("ok", "space", f"1 GiB and more in {', '.join(map(str, folders))}")


def _network(env: Mapping[str, str]) -> Iterator[Finding]:
    """Check that the other nodes of a job can reach this node by its name."""
    if count() < 2:
        return
    host = socket.gethostname()
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        address = str(addresses[0][4][0])
    except OSError:
        address = "nothing"
    # Gloo gives other nodes the address that this node's name resolves to.
    if address.startswith(("nothing", "127.", "::1")) and "GLOO_SOCKET_IFNAME" not in env:
        message = f"{host} resolves to {address} on itself, where other nodes can't reach Gloo: "
        message += "export GLOO_SOCKET_IFNAME in slurm/site.sh; 'ip -br address' shows interfaces"
        yield Finding("error", "network", message)


def report(settings: "Settings | None", findings: Iterable[Finding]) -> str:
    """Return this node's report as a line of JSON, after looking for the first node's file."""
    words = [[each.status, each.name, each.message] for each in findings]
    shared = lockable = None
    if settings:
        path = _shared_file(settings)
        with suppress(OSError):  # if the folder can't be written, there is a finding of it
            shared = _appears(path)
            with path.open("r+") as file:
                lockable = not _lock(file)
    node = {"host": socket.gethostname(), "shared": shared, "lockable": lockable}
    return json.dumps({**node, "findings": words, "time": time.time()})


def _appears(path: Path) -> bool:
    """Wait for a file of the first node; return whether it is there."""
    end = time.monotonic() + FILE_DELAY
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
        # A network file system may show an old state of a folder until this node changes it.
        tempfile.NamedTemporaryFile(dir=path.parent, prefix=".doctor-").close()
    return True


def compare(lines: Iterable[str], settings: "Settings | None") -> Iterator[Finding]:
    """Yield the findings of all nodes, and those about differences between them.

    Args:
        lines: what the nodes print: their reports, and other lines, which are printed.
    """
    shared = _shared_file(settings)
    with suppress(OSError):  # the nodes report that the folder can't be written
        shared.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            file = stack.enter_context(shared.open("x"))
            stack.callback(shared.unlink, missing_ok=True)
            _lock(file)
        except FileExistsError:  # perhaps another user's, or a link
            message = f"{shared} exists: remove it, or choose another --run-root"
            yield Finding("error", "run folder", message)
        except OSError:
            pass
        reports = sorted(_reports(lines), key=itemgetter("host"))
    yield from merge(reports)
    hosts = [report["host"] for report in reports]
    if len(hosts) < count():
        message = f"{len(hosts)} of {count()} reported ({', '.join(hosts)}): see the lines above; "
        message += "is each node up, and does Python start there?"
        yield Finding("error", "nodes", message)
    here = [report["delay"] for report in reports if report["host"] == socket.gethostname()]
    for report in reports:
        apart = min(here, default=0) - report["delay"]
        if abs(apart) >= CLOCK_WARNING:
            yield replace(_clock("the first node", apart), nodes=(report["host"],))
    root = shared.parent
    if strangers := tuple(report["host"] for report in reports if report["shared"] is False):
        message = f"{root} is not the first node's folder: set run_root to a folder that all share"
        yield Finding("error", "shared folder", message, strangers)
    elif seen := [report for report in reports if report["shared"]]:
        yield Finding("ok", "shared folder", f"{root} is the same on {len(seen)} node(s)")
    unlocked = tuple(report["host"] for report in reports if report["lockable"])
    if unlocked and (trackers := _databases(settings)):
        message = f"files in {root} that another node has locked can be locked again, {trackers}"
        yield Finding("warning", "locks", message, unlocked)


def _reports(lines: Iterable[str]) -> Iterator[Report]:
    """Yield the reports, each with its delay: seconds on its way, by the clocks of two nodes."""
    for line in lines:
        try:
            report = json.loads(line)
            report["delay"] = time.time() - report["time"]
        except (ValueError, TypeError, KeyError):
            say(line, end="")
        else:
            yield report


def merge(reports: Sequence[Report]) -> Iterator[Finding]:
    """Yield each finding once, with its nodes unless it is about all of them."""
    found: dict[str, dict[Finding, list[str]]] = {}
    for report in reports:
        for finding in (Finding(*words) for words in report["findings"]):
            found.setdefault(finding.name, {}).setdefault(finding, []).append(report["host"])
    for name, findings in found.items():
        each = "; ".join(f"{item.message} on {', '.join(on)}" for item, on in findings.items())
        if name in DIFFERENCES and len(findings) > 1 and {f.status for f in findings} == {"ok"}:
            yield Finding(DIFFERENCES[name], name, f"nodes should be alike, but have {each}")
            continue
        for finding, on in findings.items():
            yield replace(finding, nodes=() if len(on) == len(reports) else tuple(on))


def _shared_file(settings: "Settings | None") -> Path:
    """Return the file of the first node that the others look for."""
    root = Path(settings.run_root if settings else ".")
    return root / f".doctor-{os.environ.get('SLURM_JOB_ID', 0)}"


def _clock(reference: str, apart: float) -> Finding:
    """Return what it means that this clock is some seconds ahead of another, or behind it."""
    if abs(apart) < CLOCK_WARNING:
        return Finding("ok", "clock", f"agrees with {reference}")
    message = (
        f"is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} {reference}: logs get out "
        "of order, and with minutes Slurm refuses credentials: tell your administrators"
    )
    return Finding("error" if abs(apart) >= CLOCK_ERROR else "warning", "clock", message)
