"""Joins the ranks to a process group, and explains the errors of lost ranks."""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from ..config import Settings
from ..errors import LEFT, LostRankError, UsageError
from .device import check_shared_gpus, choose_backend, choose_device, gpu_id
from .environment import Ranks, rendezvous_address
from .signals import default_signals
from .world import World

LOST = re.compile("gloo/transport|peer|Application timeout")
"""Words in the errors of Gloo about a rank that is gone or does not answer: it has no class."""


@contextmanager
def joined(settings: Settings) -> Iterator[World]:
    """Join the other ranks and yield the `World`; leave it when the block ends without an error.

    After an error this rank does not wait: its process ends, and the launcher stops the others.

    Raises:
        UsageError: the number of ranks is not the one in the settings, the device or the backend is
            not available, the ranks can't meet, or two ranks have the same GPU.
    """
    ranks = Ranks.from_environment(os.environ)
    if settings.world_size not in (None, ranks.size):
        raise UsageError(
            f"world_size is {settings.world_size}, but the launcher ({ranks.launcher}) gave "
            f"{ranks.size} rank(s): change one of the two; tasks of an array are never ranks"
        )
    if ranks.launcher == "srun" and "OMP_NUM_THREADS" not in os.environ:
        # The batch scripts set it. Without it, each rank would use all cores of the node.
        torch.set_num_threads(ranks.cpus(os.environ))
    if settings.deterministic:
        be_deterministic()
    device = choose_device(settings.device, ranks)
    with lost_ranks_explained(ranks.rank):
        if ranks.size > 1:
            backend = choose_backend(settings.backend, device, settings.strategy)
            world = _meet(ranks, device, backend, timedelta(seconds=settings.timeout))
        else:
            world = replace(World.alone(), **vars(ranks), device=device)
        yield world
        world.leave()


def be_deterministic() -> None:
    """Let all operations be deterministic, as PyTorch's notes on reproducibility describe it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True)


def _meet(ranks: Ranks, device: torch.device, backend: str, timeout: timedelta) -> World:
    """Start the process group and the control group; NCCL starts with the first gradients.

    Raises:
        UsageError: the ranks can't meet. The job is not requeued, as it would fail again.
        LostRankError: another rank left, perhaps because the job was stopped.
    """
    with suppress(ImportError, OSError, ValueError):  # not on Windows; macOS may refuse
        import resource

        # A rank has a connection to each other one: the usual soft limit of 1,024 is too low.
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    address = rendezvous_address(os.environ)
    host, _, port = address.rpartition(":")
    try:
        with default_signals():
            try:
                socket.getaddrinfo(host, port)
            except socket.gaierror as error:
                if error.errno != socket.EAI_AGAIN:  # torch tries again
                    raise
            store = None
            if ranks.launcher == "srun":
                # The first task on the first node serves it. A topology or `--distribution` may put
                # rank 0 elsewhere. torchrun has a store of its own.
                serves = ranks.local_rank == 0 and os.environ.get("SLURM_NODEID", "0") == "0"
                store = dist.TCPStore(host, int(port), ranks.size, serves, timeout)
            dist.init_process_group(
                backend, rank=ranks.rank, world_size=ranks.size, store=store, timeout=timeout
            )
            control = dist.new_group(backend="gloo", timeout=timeout)
    except (RuntimeError, socket.gaierror) as error:
        why = str(error).partition("\n")[0]
        raise (LostRankError if LEFT.search(why) else UsageError)(
            f"rank {ranks.rank} on {socket.gethostname()} can't meet the others at {address}: "
            f"{why} (check MASTER_ADDR, whether its port is taken, and GLOO_SOCKET_IFNAME if it "
            "is set)"
        ) from None
    world = World(**vars(ranks), device=device, backend=backend, hostnames=(), control=control)
    here = socket.gethostname()
    met = world.gather((here, gpu_id(device), os.environ.get("SLURMD_NODENAME", here)))
    hosts, gpus, nodes = zip(*met, strict=True)
    if backend != "gloo":
        check_shared_gpus(list(zip(hosts, gpus, strict=True)))
    return replace(world, hostnames=hosts, nodes=nodes)


@contextmanager
def lost_ranks_explained(rank: int) -> Iterator[None]:
    """Raise LostRankError, with one line, if another rank is gone or does not answer."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not LOST.search(str(error)):
            raise
        why = " ".join(str(error).split())
        raise LostRankError(
            f"rank {rank} on {socket.gethostname()} lost another rank ({why}): see the last log "
            "lines of that rank; if it has none, perhaps its memory ran out; if it was slow, raise "
            "--timeout"
        ) from None
