"""Joins the ranks, measures the operations and prints the results. Each rank runs this."""

from datetime import timedelta
from functools import partial
from itertools import combinations
from typing import Any

import torch
import torch.distributed as dist

from ...engine.config import Settings
from ...engine.errors import UsageError
from ...engine.ranks.device import BACKENDS
from ...engine.ranks.environment import bound_cpus
from ...engine.ranks.process_group import joined
from .operations import Channel, mark_slow, measure, measure_pair

SIZES = tuple(2**power for power in range(10, 31, 4))  # bytes: 1 KiB to 1 GiB


def examine(settings: Settings, max_bytes: int, pairwise: bool) -> dict[str, Any]:
    """Check and measure with the settings' device, backend and timeout; return all ranks' results.

    Raises:
        UsageError: there is only one rank, two ranks share a GPU, or an operation fails, hangs or
            has a wrong result.
    """
    sizes = [size for size in SIZES if size <= max_bytes] or SIZES[:1]
    with joined(settings) as world:
        if world.size == 1:
            raise UsageError(
                "check-comm needs two ranks or more, and there is only one: start it with srun or "
                "torchrun, as slurm/check_comm.sbatch does"
            )
        show = partial(print, flush=True) if world.is_main else lambda _: None
        devices = world.gather(_describe(world.device))
        for rank, host in enumerate(world.hostnames):
            show(f"rank {rank} on {host}: {devices[rank]}")
        # `within` limits the time: NCCL's own timeout aborts the process without a message.
        group: Any = dist.new_group(backend=world.backend, timeout=timedelta(days=1))
        memory = torch.device("cpu") if world.backend == "gloo" else world.device
        channel = Channel(world, group, memory, settings.timeout)
        speed, pairs = [], []
        show(f"\n{'operation':16}{'bytes':>12}{'µs':>12}{'bus GB/s':>12}")
        measured = [*(("all-reduce", size) for size in sizes), ("all-gather", sizes[-1])]
        first_ranks = {host: world.hostnames.index(host) for host in world.hostnames}
        ends = first_ranks.values() if len(first_ranks) > 1 else range(world.size)
        try:
            for doing, size in measured:
                speed.append(measure(doing, size, channel))
                show("{:16}{:>12}{:>12.1f}{:>12.3f}".format(*speed[-1].values()))
            for pair in combinations(ends, 2) if pairwise else ():
                doing = "exchange of ranks {} and {}".format(*pair)
                pairs.append(measure_pair(pair, (sizes[0], sizes[-1]), channel))
        except RuntimeError as error:
            raise UsageError(
                f"{doing} failed on rank {world.rank} on {world.hostnames[world.rank]}: "
                f"{str(error).splitlines()[0]}: see the last log lines of the other ranks; if all "
                "are alive, choose the network interface by GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME"
            ) from None
        mark_slow(pairs)
        if pairs:
            show(f"\n{'ranks':12}{'latency µs':>12}{'GB/s':>12}  nodes")
        for row in pairs:
            ranks, hosts = ("{} - {}".format(*row[name]) for name in ("ranks", "hosts"))
            mark = "  SLOW" if row["slow"] else ""
            show(f"{ranks:12}{row['microseconds']:>12.1f}{row['gb_s']:>12.3f}  {hosts}{mark}")
        show(f"\n{world.size} ranks on {world.backend}: all results are right")
        results = {"backend": world.backend, "hosts": world.hostnames, "devices": devices}
        return {**results, "speed": speed, "pairs": pairs}


def _describe(device: torch.device) -> str:
    if device.type in BACKENDS:
        return f"{device}, {torch.get_device_module(device.type).get_device_name(device)}"
    return f"{bound_cpus()} CPU cores"
