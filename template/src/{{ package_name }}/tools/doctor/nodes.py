"""What one node has, and how the nodes of a job differ.

slurm/doctor.sbatch starts `doctor --nodes=report` on each node, which prints a report as a line of
JSON. `doctor --nodes=compare` on the first node reads the reports and compares them.
"""

import json
import os
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.errors import say
from . import software
from .findings import Finding, Status, attempt
from .scripts import Script

if TYPE_CHECKING:
    from ...settings import Settings

DIFFERENCES: dict[str, Status] = {"python": "error", "torch": "error", "GPUs": "warning"}
"""The findings that should be the same on all nodes, and the status if they differ."""
# Seconds. Slurm's authentication (munge) and Kerberos refuse credentials if clocks differ by
# minutes.
CLOCK_WARNING, CLOCK_ERROR = 5, 60
FILE_DELAY = 30  # seconds that a new file may take to appear on another node

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
    yield from attempt("run folder", _writable, _run_root(settings))
    yield from attempt("network", _network, os.environ)


def _run_root(settings: "Settings | None") -> Path:
    return Path(settings.run_root if settings else ".")


def _dataset(settings: "Settings") -> Iterator[Finding]:
    """Load the dataset as every rank does, and count its samples."""
    from ...data import load

    datasets = load(settings)
    sizes = []
    for part in ("train", "validation", "test"):
        samples = getattr(datasets, part)
        sizes.append(f"{part} {len(samples) if hasattr(samples, '__len__') else 'of no length'}")
    yield Finding("ok", "dataset", f"{settings.dataset}: {', '.join(sizes)}")


def _writable(root: Path) -> Iterator[Finding]:
    """Write a file, and compare the clock of this node with the clock of the file server."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=root, prefix=".doctor-") as file:
            before = time.time()
            file.write("Can files be written here?")
            file.flush()
            stored, after = os.stat(file.name).st_mtime, time.time()
    except OSError as error:
        message = f"{root} can't be written ({error.strerror}): set run_root to a folder of yours"
        yield Finding("error", "run folder", message)
        return
    yield Finding("ok", "run folder", f"{root} can be written")
    ahead = before - stored if stored < before else min(after - stored, 0)
    if abs(ahead) < CLOCK_WARNING:
        yield Finding("ok", "clock", f"agrees with the file server of {root}")
        return
    message = (
        f"is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the file server of {root}: "
        "the times in logs are wrong, and Slurm refuses credentials if clocks differ by minutes: "
        "tell your administrators"
    )
    yield Finding("error" if abs(ahead) >= CLOCK_ERROR else "warning", "clock", message)


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
    shared = None
    if settings:
        with suppress(OSError):  # a finding already says that the folder can't be written
            shared = _appears(_shared_file(settings))
    return json.dumps({"host": socket.gethostname(), "shared": shared, "findings": words})


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
        settings: of the run; None if they can't be read.
    """
    shared = _shared_file(settings)
    with suppress(OSError):  # the nodes report that the folder can't be written
        shared.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            shared.open("x").close()
            stack.callback(shared.unlink, missing_ok=True)
        except FileExistsError:  # perhaps another user's, or a link
            message = f"{shared} exists: remove it, or choose another --run-root"
            yield Finding("error", "run folder", message)
        except OSError:
            pass
        reports = sorted(_reports(lines), key=itemgetter("host"))
    yield from _merge(reports)
    hosts = [report["host"] for report in reports]
    if len(hosts) < count():
        message = f"{len(hosts)} of {count()} reported ({', '.join(hosts)}): see the lines above; "
        message += "is each node up, and does Python start there?"
        yield Finding("error", "nodes", message)
    root = shared.parent
    if others := tuple(report["host"] for report in reports if report["shared"] is False):
        message = f"{root} is not the first node's folder: set run_root to a folder that all share"
        yield Finding("error", "shared folder", message, others)
    elif seen := [report for report in reports if report["shared"]]:
        yield Finding("ok", "shared folder", f"{root} is the same on {len(seen)} node(s)")


def _reports(lines: Iterable[str]) -> Iterator[Report]:
    """Yield the reports among some lines, and print the other lines."""
    for line in lines:
        try:
            report = json.loads(line)
            report["findings"] = [Finding(*words) for words in report["findings"]]
        except (ValueError, TypeError, KeyError):
            say(line, end="")
        else:
            yield report


def _merge(reports: Sequence[Report]) -> Iterator[Finding]:
    """Yield each finding once, with its nodes unless it is about all of them."""
    found: dict[str, dict[Finding, list[str]]] = {}
    for report in reports:
        for finding in report["findings"]:
            found.setdefault(finding.name, {}).setdefault(finding, []).append(report["host"])
    for name, findings in found.items():
        each = "; ".join(f"{item.message} on {', '.join(on)}" for item, on in findings.items())
        if name in DIFFERENCES and len(findings) > 1 and {f.status for f in findings} == {"ok"}:
            yield Finding(DIFFERENCES[name], name, f"nodes should be alike, but have {each}")
            continue
        for finding, on in findings.items():
            yield replace(finding, nodes=() if len(on) == len(reports) else tuple(on))


def _shared_file(settings: "Settings | None") -> Path:
    """Return the file that the first node makes and the other nodes look for."""
    return _run_root(settings) / f".doctor-{os.environ.get('SLURM_JOB_ID', 0)}"
