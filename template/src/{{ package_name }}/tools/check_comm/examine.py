"""What each rank does in check-comm: find its place, talk in all ways, take the time."""

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from ...core.config import Settings
from ...core.errors import UsageError
from ...core.output.log import set_up_logging
from ...core.ranks.device import (
    BACKENDS,
    choose_backend,
    choose_device,
    gpu_id,
    refuse_shared_gpus,
)
from ...core.ranks.environment import Ranks, bound_cpus
from ...core.ranks.process_group import joined
from ...core.ranks.world import World
from . import Flags
from .channel import open_channel
from .operations import OPERATIONS, check
from .roll_call import explanation
from .timing import compare, measure

SIZES = tuple(2**power for power in range(10, 31, 4))  # bytes: 1 KiB to 1 GiB


def examine(flags: Flags, ranks: Ranks) -> dict[str, Any]:
    """Check and measure; return the same results on every rank.

    Raises:
        UsageError: two ranks have one GPU, or a rank was lost or hangs.
    """
    device = choose_device(flags.device, ranks)
    backend = choose_backend(flags.backend, device)
    # The ranks meet over Gloo: so they can still talk when NCCL does not start.
    with joined(Settings.from_values({"device": "cpu", "timeout": flags.timeout})) as world:
        set_up_logging(world, all_ranks=False)
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        doing, home = "introducing the ranks", 0
        try:
            home = int(world.maximum([ranks.rank * ranks.serves_store(os.environ)])[0])
            places = world.gather(place(world, device))
            if backend != "gloo":
                refuse_shared_gpus([(each["host"], each["gpu"]) for each in places])
            doing = f"starting {backend}"
            channel = open_channel(world, backend, device, flags.timeout)
            sizes = [size for size in SIZES if size <= flags.max_bytes] or [flags.max_bytes]
            faults, speed, pairs = 0, [], []
            for doing in OPERATIONS:
                faults += check(doing, sizes, channel)
            faults = int(world.sum([faults])[0])
            for doing in OPERATIONS:
                speed += measure(doing, sizes, channel)
            if flags.pairs:
                doing = "comparing pairs"
                pairs = compare(sizes, channel)
        except RuntimeError as error:
            raise UsageError(explanation(doing, error, world, store, home, flags.timeout)) from None
    report = {"backend": backend, "ranks": places, "faults": faults, "speed": speed}
    return {**report, "pairs": pairs} if flags.pairs else report


def place(world: World, device: torch.device) -> dict[str, Any]:
    """Return where this rank is."""
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
