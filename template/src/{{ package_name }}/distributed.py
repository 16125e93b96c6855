"""Joining the other ranks, talking to them, and leaving them; and this rank's device."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from logging.handlers import MemoryHandler
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import Settings
from .errors import LostRankError, UsageError
from .launcher import Ranks, meeting_point


@dataclass
class World:
    """The ranks that train together, seen from one of them.

    Gradients travel through the default process group. What ranks tell each other besides goes
    through `control`, a group of its own, over Gloo and between CPUs: no GPU waits for it.
    """

    rank: int
    size: int
    local_rank: int
    launcher: str
    device: torch.device
    backend: str | None
    hostnames: tuple[str, ...]
    control: dist.ProcessGroup | None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes the files."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Return the sums of the values over all ranks, the same numbers on each."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def maximum(self, values: list[float]) -> list[float]:
        """Return the largest of each value over all ranks, the same numbers on each."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def sum_tensor(self, values: Tensor) -> Tensor:
        """Return the sums of a tensor on the CPU over all ranks, the same on each."""
        if self.size > 1 and values.numel():
            dist.all_reduce(values, group=self.control)
        return values

    def _reduce(self, values: list[float], operation: dist.ReduceOp) -> list[float]:
        if self.size == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)  # in which counts stay exact
        dist.all_reduce(tensor, operation, group=self.control)
        return tensor.tolist()

    def start_sum(self, values: list[int]) -> "Sum":
        """Start to sum the values over all ranks, and return what has the sums later."""
        tensor = torch.tensor(values, dtype=torch.int64)
        if self.size == 1:
            return Sum(tensor, None)
        return Sum(tensor, dist.all_reduce(tensor, group=self.control, async_op=True))

    def share(self, value: Any) -> Any:  # noqa: ANN401 - whatever can be pickled
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, group=self.control)
        return values[0]

    def gather(self, value: Any) -> list[Any]:  # noqa: ANN401 - whatever can be pickled
        """Return the values of all ranks, on every rank."""
        values = [value]
        if self.size > 1:
            values *= self.size
            dist.all_gather_object(values, value, group=self.control)
        return values

    def gather_on_main(self, value: Any) -> list[Any]:  # noqa: ANN401 - whatever can be pickled
        """Return the values of all ranks on rank 0, an empty list on the others."""
        values = [value] * self.size if self.is_main else []
        if self.size > 1:
            dist.gather_object(value, values or None, group=self.control)
        return values

    def on_main(self, function: Callable[[], Any]) -> Any:  # noqa: ANN401 - what it returns
        """Call a function on rank 0 and return on every rank what it returned.

        Raises:
            UsageError: on every rank, where the function raised it; so no rank waits for one that
                has left.
        """
        result = None
        if self.is_main:
            try:
                result = function()
            except UsageError as error:
                result = error
        result = self.share(result)
        if isinstance(result, UsageError):
            raise result
        return result

    def leave(self) -> None:
        """Part from the other ranks, when all have come here."""
        if self.size > 1:
            # Rank 0 may still have been writing, and the launcher ends all once one has left.
            dist.barrier(self.control)
            # Gloo's threads drop tensors that Python made, and abort the process if they do so
            # while the interpreter shuts down. They are joined with the last reference.
            self.control = None
            dist.destroy_process_group()


@dataclass
class Sum:
    """Sums over all ranks that are on their way while a rank does something else."""

    tensor: Tensor
    work: dist.Work | None

    def result(self) -> list[int]:
        """Wait for the others; return the sums, the same numbers on each rank."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.tensor.tolist()


@contextmanager
def joined(settings: Settings) -> Iterator[World]:
    """Join the other ranks and yield the `World`; leave it when the block ends well.

    After an error nothing is waited for: the process ends, and the launcher stops the others.

    Raises:
        UsageError: the world has another size than asked for, or the device, the backend or the
            port can't be had.
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
        torch.set_num_threads(int(os.environ.get("SLURM_CPUS_PER_TASK", 1)))
    device = choose_device(settings.device, ranks)
    backend = choose_backend(settings.backend, device) if ranks.size > 1 else None
    if backend:
        _allow_connections()
        address = meeting_point(os.environ)
        try:
            dist.init_process_group(
                backend,
                init_method="env://",
                rank=ranks.rank,
                world_size=ranks.size,
                timeout=timedelta(seconds=settings.timeout),
                device_id=device if device.type == "cuda" else None,
            )
        except dist.DistError as error:
            raise LostRankError(
                f"rank {ranks.rank} on {socket.gethostname()} can't meet the others at {address}: "
                f"{str(error).splitlines()[0]} (is MASTER_PORT taken by another program, or "
                "MASTER_ADDR out of reach?)"
            ) from None
    with lost_ranks_named(ranks.rank, settings.timeout):
        world = World(
            ranks.rank,
            ranks.size,
            ranks.local_rank,
            ranks.launcher,
            device,
            backend,
            *_introduce(ranks, settings.timeout),
        )
        yield world
    world.leave()


@contextmanager
def lost_ranks_named(rank: int, timeout: int) -> Iterator[None]:
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
                f"{here} waited {timeout} s in vain for another rank: look above for what that one "
                "said last, and whether --timeout is long enough"
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


def _introduce(ranks: Ranks, timeout: int) -> tuple[tuple[str, ...], dist.ProcessGroup | None]:
    """Return the hostnames of all ranks, and the group through which they talk."""
    if ranks.size == 1:
        return (socket.gethostname(),), None
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    hostnames: list[Any] = [None] * ranks.size
    dist.all_gather_object(hostnames, socket.gethostname(), group=control)
    return tuple(hostnames), control


def refuse_different_settings(settings: Settings, world: World) -> None:
    """Make sure that all ranks were started with the same settings.

    Raises:
        UsageError: on a rank whose settings are not rank 0's.
    """
    mine = settings.as_dict()
    for name, value in world.share(mine).items():
        if mine[name] != value:
            raise UsageError(
                f"rank {world.rank} has {name} {mine[name]}, but rank 0 has {value}: start all "
                "ranks with the same flags and the same configs/train.yaml"
            )


def refuse_different_samples(name: str, samples: int | None, world: World) -> None:
    """Make sure that a set has samples, and as many on all ranks; None: nobody knows.

    Raises:
        UsageError: on every rank, if it has not.
    """
    most, fewest = world.maximum([samples or 0, -(samples or 0)])
    if most != -fewest:
        raise UsageError(
            f"the {name} set has {samples} samples on rank {world.rank}, and from {-fewest:.0f} "
            f"to {most:.0f} on all: data.py must return the same on each, which sharding.py shares "
            "out"
        )
    if samples == 0:
        raise UsageError(f"the {name} set has no samples: is data_dir the right folder?")


def choose_device(wanted: str, ranks: Ranks) -> torch.device:
    """Return this rank's device, and make it current where it is a GPU.

    Raises:
        UsageError: the device is not there, or this rank has none of its own.
    """
    if wanted == "auto":
        mps = torch.backends.mps.is_available() and ranks.size == 1
        wanted = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if wanted == "mps":
        if not torch.backends.mps.is_available():
            raise UsageError("device is mps, but this machine has none: use --device cpu or auto")
        if ranks.size > 1:
            raise UsageError("device mps works for one process: use --device cpu for several ranks")
    if wanted != "cuda":
        return torch.device(wanted)
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = f"rank {ranks.rank} on {socket.gethostname()}"
    if not visible:
        raise UsageError(
            f"device is cuda, but {here} sees no GPU (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}, torch {torch.__version__}): ask "
            "Slurm for GPUs, install a CUDA build of torch, or use --device cpu"
        )
    # Slurm may show each task only its own GPU, which then has index 0.
    index = 0 if visible == 1 else ranks.local_rank
    if index >= visible or (visible == 1 and ranks.local_rank > 0 and not _has_own_gpu(ranks)):
        raise UsageError(
            f"{here} has local rank {ranks.local_rank}, but sees {visible} GPU(s): start as many "
            "ranks a node as it has GPUs"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def _has_own_gpu(ranks: Ranks) -> bool:
    """Whether the one visible GPU is this rank's alone: only srun can bind a GPU to each task."""
    return ranks.launcher == "srun"


def choose_backend(wanted: str, device: torch.device) -> str:
    """Return the backend for a device.

    Raises:
        UsageError: NCCL was asked for without a GPU.
    """
    if wanted == "nccl" and device.type != "cuda":
        raise UsageError(f"backend nccl needs GPUs, but the device is {device}: use gloo or auto")
    return wanted if wanted != "auto" else "nccl" if device.type == "cuda" else "gloo"


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Return the context of a forward pass; bf16 has fp32's range, so needs no gradient scaler."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def set_up_logging(world: World, all_ranks: bool) -> None:
    """Prefix log lines with the rank; let rank 0 alone speak below warnings, or all ranks."""
    logging.basicConfig(
        format=f"%(asctime)s [rank {world.rank}] %(message)s",
        datefmt="%H:%M:%S",
        level=logging.INFO if world.is_main or all_ranks else logging.WARNING,
        force=True,
    )
    if world.is_main:
        # Keeps what is said until the run folder has a file for it (report.py).
        logging.getLogger().addHandler(MemoryHandler(capacity=0))
    # It tells of its fonts.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
