"""Joins the ranks, and checks and measures the operations on them. Each rank runs this."""

import os
import re
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...engine.config import Settings
from ...engine.errors import UsageError
from ...engine.ranks.device import (
    BACKENDS,
    check_shared_gpus,
    choose_backend,
    choose_device,
    gpu_id,
)
from ...engine.ranks.environment import Ranks, bound_cpus
from ...engine.ranks.process_group import joined
from ...engine.ranks.world import World
from ...engine.run.logging_setup import set_up_logging
from .flags import Flags
from .operations import COLLECTIVES, Channel, compare, measure, within

SIZES = tuple(2**power for power in range(10, 31, 4))  # bytes: 1 KiB to 1 GiB


def examine(flags: Flags, ranks: Ranks, report: dict[str, Any]) -> None:
    """Check and measure the operations; add the results to the report, the same on every rank.

    Raises:
        UsageError: two ranks share a GPU, or a rank was lost or hangs.
    """
    device = choose_device(flags.device, ranks)
    backend = choose_backend(flags.backend, device)
    sizes = [size for size in SIZES if size <= flags.max_bytes] or [flags.max_bytes]
    # The ranks join over Gloo, so that they can report a failure of NCCL to each other.
    with joined(Settings.from_values({"device": "cpu", "timeout": flags.timeout})) as world:
        set_up_logging(world, all_ranks=False)
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        doing, home = "connecting the ranks", 0
        try:
            home = int(world.maximum([ranks.rank * ranks.serves_store(os.environ)])[0])
            places = world.gather(describe(world, device))
            report.update(backend=backend, ranks=places)
            if backend != "gloo":
                check_shared_gpus([(each["host"], each["gpu"]) for each in places])
            # `within` limits the time: NCCL's own timeout aborts the process without a message.
            group = dist.new_group(backend=backend, timeout=timedelta(days=1))
            memory = torch.device("cpu") if backend == "gloo" else device
            channel = Channel(world, group, memory, flags.timeout)
            for doing in COLLECTIVES:
                for size in sizes:
                    report["speed"].append(measure(doing, size, channel))
                    report["faults"] += report["speed"][-1]["wrong_ranks"]
            if flags.pairs:
                doing, report["pairs"] = "comparing pairs", []
                for pair in compare(sizes, channel):
                    report["pairs"].append(pair)
        except RuntimeError as error:
            missing = missing_ranks(world, store, home, flags.timeout)
            raise UsageError(explanation(doing, error, world, missing)) from None


def describe(world: World, device: torch.device) -> dict[str, Any]:
    """Return the host and the device of this rank."""
    if device.type in BACKENDS:
        name = torch.get_device_module(device.type).get_device_name(device)
        facts = f"{name}, {gpu_id(device)}"
    else:
        facts = f"{bound_cpus()} CPU cores"
    return {
        "rank": world.rank,
        "local_rank": world.local_rank,
        "host": socket.gethostname(),
        "device": str(device),
        "facts": facts,
        "gpu": gpu_id(device),
    }


def explanation(doing: str, error: RuntimeError, world: World, missing: list[int]) -> str:
    """Return one line about an operation that failed."""
    here = f"rank {world.rank} on {socket.gethostname()}"
    # Gloo's messages begin with a line of its source and end with advice.
    reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", str(error).splitlines()[0])
    if missing:
        names = ", ".join(f"rank {rank} on {world.hostnames[rank]}" for rank in missing)
        return (
            f"{doing} failed: no answer from {names} (reported by {here}: {reason}), dead or hung: "
            "see the last log lines of that rank, and its node"
        )
    return (
        f"{doing} failed on {here}, but all ranks are alive: {reason} (if the nodes can't reach "
        "each other, choose another interface with GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME)"
    )


def missing_ranks(world: World, store: dist.TCPStore, home: int, timeout: int) -> list[int]:
    """Return the ranks that do not report to torch's store after an error.

    A live rank may report up to `timeout` seconds after this one.

    Args:
        home: the rank that serves the store; 0 if torchrun serves it.
    """

    def collect() -> list[int]:
        store.set(f"check-comm/{world.rank}", "here")
        missing, end = list(range(world.size)), time.monotonic() + timeout + 5
        while missing and time.monotonic() < end:
            time.sleep(0.5)
            missing = [rank for rank in missing if not store.check([f"check-comm/{rank}"])]
        time.sleep(2 if world.rank == home else 0)  # under srun, the store ends with this rank
        return missing

    try:
        return within(timeout + 10, collect)
    except RuntimeError:
        return [home]
