"""Checks one node, and compares the nodes of a job.

slurm/doctor.sbatch starts `doctor --nodes=report` on each node, which prints its findings as a line
of JSON. On the first node, `doctor --nodes=compare` reads these lines and compares them.
"""

import json
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING

from ...engine.errors import say
from . import software
from .findings import Finding, Status, attempt
from .scripts import Script

if TYPE_CHECKING:
    from ...settings import Settings

ALIKE: dict[str, Status] = {"python": "error", "torch": "error", "GPUs": "warning"}
"""The findings that should be the same on all nodes, and the status if they differ."""
CLOCK = 10  # seconds that a clock may be wrong
SLOW = 1.15  # a node is slow if it needs more than this factor times the nodes' median


def check(settings: "Settings | None", jobs: Sequence[Script]) -> Iterator[Finding]:
    """Check this node: software, GPUs, dataset, run root, network."""
    yield from attempt("python", software.python)
    yield from attempt("packages", software.packages)
    yield from attempt("torch", software.pytorch, settings, jobs)
    if settings:
        yield from attempt("dataset", _dataset, settings)
        yield from attempt("run folder", _run_folder, Path(settings.run_root))
    if node_count() > 1:
        yield from attempt("network", _network)


def node_count() -> int:
    """Return the number of nodes of the job, or 1 outside a job."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES") or 1)


def _dataset(settings: "Settings") -> Iterator[Finding]:
    """Load the dataset as every rank does, and count its samples."""
    from ...data import load

    datasets = load(settings)
    sizes = []
    for part in ("train", "validation", "test"):
        samples = getattr(datasets, part)
        sizes.append(f"{part} {len(samples) if hasattr(samples, '__len__') else 'of no length'}")
    yield Finding("ok", "dataset", f"{settings.dataset}: {', '.join(sizes)}")


def _run_folder(root: Path) -> Iterator[Finding]:
    """Write a file, and compare the clock of this node with the clock of the file server."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root, prefix=".doctor-") as file:
            file.write(b"Can files be written here?")
            file.flush()
            ahead = time.time() - os.stat(file.name).st_mtime
    except OSError as error:
        message = f"{root} can't be written ({error.strerror}): set run_root to a folder of yours"
        yield Finding("error", "run folder", message)
        return
    yield Finding("ok", "run folder", f"{root} can be written")
    if abs(ahead) > CLOCK:
        message = f"is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the file server "
        message += f"of {root}: times in logs are wrong, and Slurm refuses credentials if clocks "
        message += "differ by minutes: tell your administrators"
        yield Finding("warning", "clock", message)


def _network() -> Iterator[Finding]:
    """Check that this node's name resolves to an address that other nodes can reach, for Gloo."""
    host = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError:
        address = "nothing"
    if address.startswith(("nothing", "127.", "::1")) and "GLOO_SOCKET_IFNAME" not in os.environ:
        message = f"{host} resolves to {address} on itself, where other nodes can't reach Gloo: "
        message += "export GLOO_SOCKET_IFNAME in slurm/site.sh; 'ip -br address' shows interfaces"
        yield Finding("error", "network", message)


def report(settings: "Settings | None", findings: Iterable[Finding]) -> str:
    """Return this node's report as a line of JSON; leave a file in the run root for `compare`."""
    found, marker = list(findings), None
    if settings:
        with suppress(OSError):  # a finding already says that the folder can't be written
            _, marker = tempfile.mkstemp(dir=settings.run_root, prefix=".doctor-")
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    seconds = _seconds(settings) if node_count() > 1 else {}
    return json.dumps({"host": host, "marker": marker, "findings": found, "seconds": seconds})


def _seconds(settings: "Settings | None") -> dict[str, float]:
    """Return the seconds of a matrix product on a CPU core and on each GPU.

    It is repeated for half a second, and the shortest time counts.
    """
    best: dict[str, float] = {}
    with suppress(Exception):  # a finding already says what is wrong with torch or a GPU
        import torch

        torch.set_num_threads(1)
        gpus = 0 if settings and settings.device == "cpu" else torch.cuda.device_count()
        for device in ("cpu", *(f"cuda:{index}" for index in range(gpus))):
            matrix = torch.ones(2, *[256 if device == "cpu" else 4096] * 2, device=device)
            until = time.perf_counter() + 0.5
            while (began := time.perf_counter()) < until:
                torch.mm(matrix[0], matrix[1])[0, 0].item()  # waits for the GPU
                took = time.perf_counter() - began
                best[device] = min(best.get(device, took), took)
    return best


def compare(lines: Iterable[str], settings: "Settings | None") -> Iterator[Finding]:
    """Yield the findings of all nodes, and findings about differences between nodes.

    Args:
        lines: the output of the nodes. Lines that are not reports are printed.
        settings: settings of the run, or None if they can't be read.
    """
    reports: dict[str, list[Finding]] = {}
    shared: dict[str, bool] = {}
    speeds: dict[str, dict[str, float]] = {}
    for line in lines:
        try:
            report = json.loads(line)
            host = report["host"]
            reports[host] = [Finding(*each) for each in report["findings"]]
            speeds[host] = report["seconds"]
        except (ValueError, TypeError, KeyError):
            say(line, end="")
            continue
        if settings and report["marker"]:
            marker = Path(settings.run_root, Path(report["marker"]).name)
            shared[host] = marker.exists()
            marker.unlink(missing_ok=True)
    yield from _merge(reports)
    yield from _slow(speeds)
    if len(reports) < node_count():
        message = f"{len(reports)} of {node_count()} reported ({', '.join(sorted(reports))}): see "
        message += "the lines above; is each node up, and does Python start there?"
        yield Finding("error", "nodes", message)
    others = ", ".join(sorted(host for host, seen in shared.items() if not seen))
    if settings and others:
        message = f"{others}: {settings.run_root} is not the first node's folder: set run_root to "
        yield Finding("error", "shared folder", f"{message}a folder that all share")
    elif settings and shared:
        message = f"{settings.run_root} is the same on {len(shared)} node(s)"
        yield Finding("ok", "shared folder", message)


def _slow(speeds: dict[str, dict[str, float]]) -> Iterator[Finding]:
    """Yield a finding about slow nodes, from the seconds of each node on each device."""
    for host, of_host in sorted(speeds.items()):
        for device, seconds in of_host.items():
            usual = median_low(each[device] for each in speeds.values() if device in each)
            if seconds > SLOW * usual:
                message = f"{host}: {device} took {seconds / usual:.2f} times as long as the "
                message += f"median node: to leave it out, submit with sbatch --exclude={host}"
                yield Finding("warning", "speed", message)


def _merge(reports: dict[str, list[Finding]]) -> Iterator[Finding]:
    """Yield each finding once, with the names of its nodes unless all nodes have it."""
    hosts: dict[Finding, list[str]] = {}
    for host in sorted(reports):
        for finding in reports[host]:
            hosts.setdefault(finding, []).append(host)
    variants = Counter(finding.name for finding in hosts if finding.status == "ok")
    for finding, having in hosts.items():
        status, name, message = finding
        if len(having) < len(reports):
            message = f"{', '.join(having)}: {message}"
        if status == "ok" and name in ALIKE and variants[name] > 1:
            status, message = ALIKE[name], f"{message}, but nodes should be alike: choose others"
        yield Finding(status, name, message)
