"""Joining the other ranks, and leaving them: the process group, and errors of lost ranks."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..config import Settings
from ..errors import LEFT, LostRankError, UsageError
from .device import (
    check_shared_gpus,
    choose_backend,
    choose_device,
    gpu_id,
    use_deterministic_algorithms,
)
from .environment import Ranks, rendezvous_address
from .signals import leave_at_signals
from .world import World


@contextmanager
def joined(settings: Settings) -> Iterator[World]:
    """Join the other ranks and yield the `World`; leave it when the block ends well.

    After an error nothing is waited for: the process ends, and the launcher stops the others.

    Raises:
        UsageError: the world has another size than asked for, or the device, the backend or the
            port can't be had, or two ranks have the same GPU.
    """
    ranks = Ranks.from_environment(os.environ)
    if settings.world_size not in (None, ranks.size):
        array = ", and tasks of an array are jobs of their own, never ranks"
        raise UsageError(
            f"world_size is {settings.world_size}, but the launcher ({ranks.launcher}) gave "
            f"{ranks.size} rank(s){array if 'SLURM_ARRAY_TASK_ID' in os.environ else ''}: change "
            "one of the two"
        )
    if ranks.launcher == "srun" and "OMP_NUM_THREADS" not in os.environ:
        # The batch scripts set it. Without, each rank would take all cores of the node.
        torch.set_num_threads(ranks.cpus(os.environ))
    if settings.deterministic:
        use_deterministic_algorithms()
    device = choose_device(settings.device, ranks)
    backend = None
    if ranks.size > 1:
        backend = choose_backend(settings.backend, device, settings.strategy)
    with lost_ranks_explained(ranks.rank, settings.timeout):
        with leave_at_signals(), _meeting_explained(ranks):
            _meet(ranks, backend, settings.timeout)
            hostnames, control = _introduce(ranks, backend, device, settings.timeout)
        world = World(
            ranks.rank,
            ranks.size,
            ranks.local_rank,
            ranks.launcher,
            device,
            backend,
            hostnames,
            control,
        )
        yield world
        world.leave()


def _meet(ranks: Ranks, backend: str | None, timeout: int) -> None:
    """Start the process group, if there are several ranks."""
    if not backend:
        return
    _allow_connections()
    host, _, port = rendezvous_address(os.environ).rpartition(":")
    try:
        socket.getaddrinfo(host, port)
    except socket.gaierror as error:
        if error.errno != socket.EAI_AGAIN:  # torch tries again
            raise
    limit = timedelta(seconds=timeout)
    store = None
    if ranks.launcher == "srun":
        serves = ranks.serves_store(os.environ)
        store = dist.TCPStore(host, int(port), ranks.size, serves, limit)
    dist.init_process_group(
        backend, rank=ranks.rank, world_size=ranks.size, store=store, timeout=limit
    )


@contextmanager
def _meeting_explained(ranks: Ranks) -> Iterator[None]:
    """Say in one line why ranks can't meet.

    Raises:
        UsageError: they can't. The job does not go back to the queue, as it would end there again.
        LostRankError: another rank left meanwhile, maybe since the job was stopped.
    """
    try:
        yield
    except (RuntimeError, socket.gaierror) as error:
        address = rendezvous_address(os.environ)
        why, hint = str(error).partition("\n")[0], "is MASTER_ADDR out of reach, or its port taken?"
        if "gloo" in why:
            hint = "does GLOO_SOCKET_IFNAME name an interface between the nodes?"
        try:
            socket.getaddrinfo(address.rpartition(":")[0], None)
        except OSError as unknown:
            why, hint = f"the name does not resolve, {unknown.strerror}", "is MASTER_ADDR right?"
        raise (LostRankError if LEFT.search(why) else UsageError)(
            f"rank {ranks.rank} on {socket.gethostname()} can't meet the others at {address}: "
            f"{why} ({hint})"
        ) from None


@contextmanager
def lost_ranks_explained(rank: int, timeout: int) -> Iterator[None]:
    """Say in one line what Gloo says of a rank that is gone, or of one that no longer answers.

    Args:
        rank: this one.
        timeout: seconds that ranks wait for each other.

    Raises:
        LostRankError: another rank is gone, or says nothing.
    """
    try:
        yield
    except RuntimeError as error:
        here = f"rank {rank} on {socket.gethostname()}"
        if any(sign in str(error) for sign in ("Timed out waiting", "Application timeout")):
            raise LostRankError(
                f"{here} waited {timeout} s for another rank, which did not answer: look above for "
                "what that one said last, and whether --timeout is long enough"
            ) from None
        if any(sign in str(error) for sign in ("peer", "gloo/transport")):
            raise LostRankError(
                f"{here} lost another rank: look above for what that one said last (killed for its "
                "memory, perhaps, if nothing)"
            ) from None
        if isinstance(error, dist.DistError):
            raise LostRankError(
                f"{here} can't talk to the others: {' '.join(str(error).split())}"
            ) from None
        raise


def _allow_connections() -> None:
    """Let this process open as much as it may: the store and Gloo hold a connection to each rank.

    The usual soft limit of 1,024 would end worlds of some hundred ranks.
    """
    with suppress(ImportError, OSError, ValueError):  # Windows has no limits, macOS not this one
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _introduce(
    ranks: Ranks, backend: str | None, device: torch.device, timeout: int
) -> tuple[tuple[str, ...], dist.ProcessGroup | None]:
    """Return the hostnames of all ranks, and the group through which they talk.

    NCCL starts only after this, with the first gradients.
    """
    if ranks.size == 1:
        return (socket.gethostname(),), None
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    gpus: list[Any] = [None] * ranks.size
    dist.all_gather_object(gpus, (socket.gethostname(), gpu_id(device)), group=control)
    if backend != "gloo":
        check_shared_gpus(gpus)
    return tuple(host for host, _ in gpus), control
