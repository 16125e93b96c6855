"""The rendezvous of the ranks, or of the torchrun processes of all nodes.

PyTorch's own rendezvous does not say who is missing; this one does.
"""

import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from ..errors import LEFT, LostRankError, UsageError, note_bad_nodes
from .environment import Ranks
from .signals import default_signals
from .slurm_commands import ask

LEAVING = 5
"""Seconds in which the launcher should end all ranks after one rank has reported who is missing."""


@contextmanager
def meeting(who: str, address: str) -> Iterator[None]:
    """Return a context in which signals end this process, and network errors become one line.

    Args:
        who: the name of this process in the error message, such as "rank 3".
        address: the address of the meeting, as HOST:PORT.

    Raises:
        UsageError: the address is wrong, or nobody answers there. The job is not requeued, since
            it would fail again.
        LostRankError: another rank left, perhaps because the job was stopped.
    """
    host, _, port = address.rpartition(":")
    try:
        with default_signals():
            try:
                socket.getaddrinfo(host, port)
            except socket.gaierror as error:
                if error.errno != socket.EAI_AGAIN:  # a temporary failure: torch will try again
                    raise
            yield
    except (RuntimeError, socket.gaierror) as error:
        why = str(error).partition("\n")[0]
        raise (LostRankError if LEFT.search(why) else UsageError)(
            f"{who} on {socket.gethostname()} can't meet the others at {address}: {why} (check "
            "MASTER_ADDR, whether its port is taken or its node is down, and GLOO_SOCKET_IFNAME if "
            "it is set)"
        ) from None


def join_store(ranks: Ranks, address: str, limit: timedelta) -> dist.TCPStore:
    """Return the TCPStore that all tasks of a step share.

    The first task on the first node serves it. This need not be rank 0: a topology or srun's
    `--distribution` may place rank 0 on another node. torchrun, in the same process, uses the same
    server.

    Args:
        ranks: the rank of this process.
        address: the address of the server, as HOST:PORT.
        limit: how long to wait for the server.
    """
    host, _, port = address.rpartition(":")
    serves = ranks.local_rank == 0 and os.environ.get("SLURM_NODEID", "0") == "0"
    return dist.TCPStore(
        host, int(port), None, serves, limit, wait_for_workers=False, multi_tenant=True
    )


def wait_for_all(store: dist.Store, ranks: Ranks, limit: timedelta, what: str = "rank") -> None:
    """Wait until all ranks have called this function.

    Args:
        store: the store that all ranks share.
        ranks: the rank of this process, or its number among the torchrun processes.
        limit: how long to wait.
        what: the word for a process in the error message, such as "rank".

    Raises:
        UsageError: some ranks are missing after `limit`; all other ranks raise the same error.
            Nodes on which all ranks are missing are appended to the file that BAD_NODES_FILE names.
    """
    store.set(f"meeting/{ranks.rank}", os.environ.get("SLURMD_NODENAME") or socket.gethostname())
    if store.add("meeting/came", 1) == ranks.size:
        store.compare_set("meeting/end", "", "all")
    pause = LEAVING
    try:
        store.wait(["meeting/end"], limit)
    except dist.DistStoreError:
        if store.add("meeting/late", 1) == 1:  # the first rank to time out reports for all
            text, nodes = _missing(store, ranks.size, what)
            # The last rank may arrive at this moment, and set "all" first.
            if store.compare_set("meeting/end", "", text) != b"all":
                pause = 1  # time for the other ranks to read the text
                note_bad_nodes(nodes)
    end = store.get("meeting/end").decode()
    if end != "all":
        time.sleep(pause)
        raise UsageError(f"after {limit.total_seconds():.0f} seconds, {end}")


def _missing(store: dist.Store, size: int, what: str) -> tuple[str, list[str]]:
    """Return a text that names the missing ranks, and the nodes on which all ranks are missing."""
    keys = {number: f"meeting/{number}" for number in range(size)}
    came = {number: store.get(key).decode() for number, key in keys.items() if store.check([key])}
    counts = Counter(came.values())
    nodes = [node for node in _nodes() if node not in counts]
    absent = [str(number) for number in range(size) if number not in came]
    text = f"{len(absent)} of {size} {what}s are missing: {what} {', '.join(absent[:8])}"
    text += ", …" * (len(absent) > 8)
    if fewer := [f"{node} has {n}" for node, n in counts.items() if n < max(counts.values())]:
        text += f" ({', '.join(fewer[:8])})"
    text += f"; none came from {','.join(nodes)}" * bool(nodes)
    text += ": see their last log lines; if they are only slow to start, raise --meet-timeout"
    return text + f", else submit with sbatch --exclude={','.join(nodes)}" * bool(nodes), nodes


def _nodes() -> list[str]:
    """Return the names of the step's nodes; an empty list if they are unknown.

    In a container without Slurm's commands, the names are those of the job's nodes, which
    slurm/common.sh exports.
    """
    with suppress(UsageError, KeyError):
        return ask("scontrol", "show", "hostnames", os.environ["SLURM_STEP_NODELIST"]).split()
    nodes = os.environ.get("JOB_NODES", "").split(",")
    return nodes if os.environ.get("SLURM_STEP_NUM_NODES") == str(len(nodes)) else []
