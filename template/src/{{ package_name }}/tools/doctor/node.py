"""What one node has: the dataset, space, a network that others can use."""

import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.ranks.environment import PORTS
from .findings import Finding

if TYPE_CHECKING:
    from ...settings import Settings

GIB = 2**30
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def dataset(settings: "Settings") -> Iterator[Finding]:
    """Load the dataset as every rank does, and count it."""
    from ...data import load

    datasets = load(settings)
    sizes = []
    for part in ("train", "validation", "test"):
        samples = getattr(datasets, part)
        sizes.append(f"{part} {len(samples) if hasattr(samples, '__len__') else 'of no length'}")
    yield Finding("ok", "dataset", f"{settings.dataset}: {', '.join(sizes)}")


def space(run_root: Path) -> Iterator[Finding]:
    """See that checkpoints, temporary files and shared memory have a little room."""
    folders = [run_root, Path(tempfile.gettempdir()), Path("/dev/shm")]
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


def network(env: Mapping[str, str]) -> Iterator[Finding]:
    """See that a job of several nodes can use this one's name and the job's own port."""
    if int(env.get("SLURM_JOB_NUM_NODES") or 1) < 2:
        return
    host = socket.gethostname()
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        address = str(addresses[0][4][0])
    except OSError:
        address = "nothing"
    # Gloo tells the other nodes the address that it finds for its own name.
    if address.startswith(("nothing", "127.", "::1")) and "GLOO_SOCKET_IFNAME" not in env:
        yield Finding(
            "error",
            "network",
            f"{host} resolves to {address} on itself, where others can't reach Gloo: export "
            "GLOO_SOCKET_IFNAME in slurm/site.sh with an interface that 'ip -br address' shows",
        )
    if PORT_RANGE.exists():
        first, last = map(int, PORT_RANGE.read_text().split())
        if first < PORTS.stop and last >= PORTS.start:
            yield Finding(
                "warning",
                "network",
                f"the kernel hands out ports from {first} on, the job's own among them: should "
                "it be taken, submit again, or export MASTER_PORT in slurm/site.sh",
            )
