"""Starts the process group of all ranks, and explains errors that a lost rank causes."""

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..config import Settings
from ..errors import LostRankError, UsageError
from ..run.clock import CLOCK
from .device import bound_device, check_shared_gpus, choose_backend, choose_device, gpu_id
from .environment import Ranks, rendezvous_address
from .meeting import join_store, meeting, wait_for_all
from .signals import default_signals
from .world import World

LOST = re.compile("gloo/transport|peer|Application timeout")
"""Matches Gloo's errors about a rank that is gone or does not answer. They have no own class."""
MISUSED = re.compile("ncclInvalid(Usage|Argument)")
"""Matches errors of NCCL that are not about another rank."""


@contextmanager
def joined(settings: Settings) -> Iterator[World]:
    """Join the other ranks, yield the `World`, and leave it if the block ends without an error.

    After an error, this rank does not wait for the others: its process ends, and the launcher stops
    them.

    Raises:
        UsageError: the number of ranks is not `world_size`, the device or the backend is not
            available, the ranks can't meet, or two ranks have the same GPU.
        LostRankError: another rank is gone or does not answer.
    """
    ranks = Ranks.from_environment(os.environ)
    if settings.world_size not in (None, ranks.size):
        raise UsageError(
            f"world_size is {settings.world_size}, but the launcher ({ranks.launcher}) gave "
            f"{ranks.size} rank(s): change one of the two; tasks of an array are never ranks"
        )
    if ranks.launcher == "srun" and "OMP_NUM_THREADS" not in os.environ:
        # The batch scripts set this variable. Without it, each rank would use all cores of the
        # node.
        torch.set_num_threads(ranks.cpus(os.environ))
    if settings.deterministic:
        be_deterministic()
    device = choose_device(settings.device, ranks)
    with lost_ranks_explained(ranks.rank):
        if ranks.size > 1:
            backend = choose_backend(settings.backend, device, settings.strategy)
            with CLOCK.during("meeting"):
                world = _meet(ranks, device, backend, settings)
        else:
            world = replace(World.alone(), **vars(ranks), device=device)
        yield world
        world.leave()


def be_deterministic() -> None:
    """Use only deterministic algorithms, as described in PyTorch's notes on reproducibility."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its start
    torch.use_deterministic_algorithms(True)


def _meet(ranks: Ranks, device: torch.device, backend: str, settings: Settings) -> World:
    """Start the default process group and the control group.

    Before PyTorch 2.15, NCCL itself connects later, at the first collective operation.

    Raises:
        UsageError: the ranks can't meet, some are missing, or two of them have the same GPU.
        LostRankError: another rank left, perhaps because the job was stopped.
    """
    with suppress(ImportError, OSError, ValueError):  # Windows has no limits; macOS may refuse
        import resource

        # Each rank has a connection to every other rank. With many ranks, the usual soft limit of
        # 1,024 open files is too low.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    who, address = f"rank {ranks.rank}", rendezvous_address(os.environ)
    meet = timedelta(seconds=settings.meet_timeout)
    timeout = timedelta(seconds=settings.timeout)
    with meeting(who, address):
        if ranks.launcher == "srun":
            store: dist.Store = join_store(ranks, address, meet)
        else:  # torchrun already serves a store
            store, *_ = next(dist.rendezvous("env://", ranks.rank, ranks.size, timeout=meet))
        wait_for_all(store, ranks, meet)
        here = socket.gethostname()
        mine = here, gpu_id(device), os.environ.get("SLURMD_NODENAME", here)
        store.set(f"meeting/facts/{ranks.rank}", json.dumps(mine))
        met = store.multi_get([f"meeting/facts/{rank}" for rank in range(ranks.size)])
    hosts, gpus, nodes = zip(*map(json.loads, met), strict=True)
    if backend != "gloo":
        check_shared_gpus(list(zip(hosts, gpus, strict=True)))
    store.set_timeout(timeout)  # from here on, ranks wait for each other's work
    kinds = f"cpu:gloo,{device.type}:{backend}"  # for `offload`: tensors are on the CPU, too
    with meeting(who, address) if backend == "gloo" else default_signals():
        dist.init_process_group(
            kinds if settings.offload and device.type != "cpu" else backend,
            rank=ranks.rank,
            world_size=ranks.size,
            store=store,
            timeout=timeout,
            device_id=bound_device(device, backend),
        )
    with meeting(who, address):
        control: Any = dist.new_group(backend="gloo", timeout=timeout)
    return World(
        **vars(ranks),
        device=device,
        backend=backend,
        hostnames=hosts,
        nodes=nodes,
        control=control,
        store=store,
    )


@contextmanager
def lost_ranks_explained(rank: int) -> Iterator[None]:
    """Turn errors that a lost rank causes into a LostRankError with a message of one line.

    Raises:
        UsageError: the error is one of NCCL that does not come from a lost rank.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not LOST.search(str(error)):
            raise
        why = " ".join(str(error).split()).partition(" This is typically ")[0]  # cuts Gloo's advice
        here = f"rank {rank} on {socket.gethostname()}"
        if MISUSED.search(why):
            raise UsageError(
                f"{here} can't use NCCL ({why}): correct the variables of NCCL that are set; "
                "NCCL_DEBUG=INFO in slurm/site.sh makes it say what it does"
            ) from None
        raise LostRankError(
            f"{here} lost another rank ({why}): see the last log "
            "lines of that rank; if it has none, perhaps its memory ran out; if it was slow, raise "
            "--timeout"
        ) from None
