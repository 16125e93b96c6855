"""Who is missing, when the ranks can't go on."""

import re
import socket
import time

import torch.distributed as dist

from ...core.ranks.world import World
from .channel import within


def explanation(
    doing: str, error: RuntimeError, world: World, store: dist.TCPStore, home: int, timeout: int
) -> str:
    """Find out who is missing after an error; return one line about it."""
    here = f"rank {world.rank} on {socket.gethostname()}"
    # Gloo begins with a place in its source, and ends with advice.
    reason = re.sub(r"^\[\S+\] |\. This is typically.*", "", str(error).splitlines()[0])
    gone = absent(world, store, home, timeout)
    if gone:
        names = ", ".join(f"rank {rank} on {world.hostnames[rank]}" for rank in gone)
        return (
            f"{doing} failed: no answer from {names} (says {here}: {reason}): it is dead or hangs, "
            "so look for what it said last, and at its node"
        )
    return (
        f"{doing} failed at {here}, though all ranks are alive: {reason} (is the network between "
        "the nodes closed to us? GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another)"
    )


def absent(world: World, store: dist.TCPStore, home: int, timeout: int) -> list[int]:
    """Call the roll; return the ranks that do not answer.

    Every rank that is alive comes here, but maybe later than this one: when its own operation has
    taken too long. So each waits that long for the others. The store is the one through which
    torch connects ranks. It lives in the rank `home`, or in torchrun.
    """
    present: set[int] = set()
    limit = timeout + 5

    def call_the_roll() -> None:
        store.set(f"check-comm/{world.rank}", "present")
        until = time.monotonic() + limit
        while len(present) < world.size and time.monotonic() < until:
            time.sleep(0.5)
            rest = set(range(world.size)) - present
            present.update(rank for rank in rest if store.check([f"check-comm/{rank}"]))
        if world.rank == home:
            time.sleep(2)  # the others, too, must be able to read the roll to its end

    try:
        within(limit + 5, call_the_roll)
    except RuntimeError:
        if not present:
            return [home]
    return sorted(set(range(world.size)) - present)
