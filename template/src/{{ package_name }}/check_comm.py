"""Can the ranks talk to each other, is what arrives right, and how fast is it?"""

import dataclasses
import json
import logging
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from .config import validated
from .distributed import World, joined, set_up_logging
from .errors import UsageError

log = logging.getLogger(__name__)

# torch 2.13 renamed it.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

DTYPES = (torch.float32, torch.int64, torch.bfloat16)
SIZES = tuple(2**power for power in range(10, 31, 4))  # bytes: 1 KiB to 1 GiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Check that the ranks can talk to each other, and how fast."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if there, else cpu"""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on cuda, else gloo"""
    timeout: int = 60
    """seconds a rank waits for the others before it gives up"""
    max_bytes: int = 64 * 2**20
    """size of the largest message"""
    json: Path | None = None
    """file for the results"""


def all_reduce(message: Tensor, _world: World) -> Tensor:
    """Sum the messages of all ranks."""
    dist.all_reduce(message)
    return message


def broadcast(message: Tensor, world: World) -> Tensor:
    """Give the last rank's message to all."""
    dist.broadcast(message, src=world.size - 1)
    return message


def all_gather(message: Tensor, world: World) -> Tensor:
    """Put together a part from each rank."""
    own = message.chunk(world.size)[world.rank]
    parts = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(parts, own)
    return torch.cat(parts)


def reduce_and_scatter(message: Tensor, world: World) -> Tensor:
    """Sum the messages of all ranks, and give a part of the sum to each."""
    part = message.new_empty(len(message) // world.size)
    reduce_scatter(part, message)
    return part


def ring(message: Tensor, world: World) -> Tensor:
    """Send to the next rank, and receive from the one before."""
    arrived = torch.empty_like(message)
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    transfers = [dist.P2POp(dist.isend, message, after), dist.P2POp(dist.irecv, arrived, before)]
    for work in dist.batch_isend_irecv(transfers):
        work.wait()
    return arrived


@dataclasses.dataclass(frozen=True)
class Operation:
    """A way of talking.

    Args:
        run: takes part with this rank's message; returns what arrived.
        expected: what must arrive, from the messages of all ranks.
        bus: bus bandwidth over algorithm bandwidth for n ranks, as nccl-tests define them.
    """

    run: Callable[[Tensor, World], Tensor]
    expected: Callable[[list[Tensor], World], Tensor]
    bus: Callable[[int], float]


OPERATIONS = {
    "all-reduce": Operation(all_reduce, lambda m, w: torch.stack(m).sum(0), lambda n: 2 - 2 / n),
    "broadcast": Operation(broadcast, lambda m, w: m[-1], lambda n: 1),
    "all-gather": Operation(
        all_gather,
        lambda m, w: torch.cat([message.chunk(w.size)[rank] for rank, message in enumerate(m)]),
        lambda n: 1 - 1 / n,
    ),
    "reduce-scatter": Operation(
        reduce_and_scatter,
        lambda m, w: torch.stack(m).sum(0).chunk(w.size)[w.rank],
        lambda n: 1 - 1 / n,
    ),
    "send/recv ring": Operation(ring, lambda m, w: m[w.rank - 1], lambda n: 1),
}


def main(argv: Sequence[str]) -> int:
    """Check and measure on the ranks that torchrun or srun started; return the exit code.

    Raises:
        UsageError: there is but one rank, or the ranks lost each other.
    """
    flags = tyro.cli(Flags, args=list(argv), prog=f"python -m {__package__} check-comm")
    wanted = {"device": flags.device, "backend": flags.backend, "timeout": flags.timeout}
    with joined(validated(wanted)) as world:
        set_up_logging(world, all_ranks=False)
        if world.size == 1:
            raise UsageError(
                "check-comm needs two ranks or more, but this process is alone: start it with "
                "srun or torchrun, as slurm/check_comm.sbatch does"
            )
        operation = "introductions"
        try:
            report: dict[str, Any] = {"ranks": places(world), "backend": world.backend}
            sizes = [size for size in SIZES if size <= flags.max_bytes] or [flags.max_bytes]
            faults = 0
            for operation in OPERATIONS:
                faults += check(operation, sizes[:3], world)
            report["faults"] = int(world.sum([faults])[0])
            report["speed"] = []
            for operation in OPERATIONS:
                report["speed"] += measure(operation, sizes, world)
        except (RuntimeError, dist.DistError) as error:
            raise UsageError(
                f"{operation} failed at rank {world.rank} on {socket.gethostname()}: "
                f"{str(error).splitlines()[0]} (is another rank gone, or the network between the "
                "nodes closed to us? GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another)"
            ) from None
        if world.is_main:
            show(report, world)
            if flags.json:
                flags.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        return 1 if report["faults"] else 0


def places(world: World) -> list[str]:
    """Return where each rank is."""
    device = str(world.device)
    if world.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(world.device)})"
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, f"{socket.gethostname()}, {device}", group=world.control)
    return found


def check(name: str, sizes: Sequence[int], world: World) -> int:
    """Return how many results of an operation were wrong on this rank."""
    faults = 0
    for dtype in DTYPES:
        if dtype is torch.bfloat16 and world.size > 128:
            continue  # it counts exactly to 256, and a rank adds up to 2
        for size in sizes:
            messages = [message(rank, size, dtype, world) for rank in range(world.size)]
            expected = OPERATIONS[name].expected(messages, world)
            arrived = OPERATIONS[name].run(messages[world.rank].clone(), world)
            if not torch.equal(arrived, expected):
                faults += 1
                log.error(
                    "wrong result of %s, %d bytes of %s: expected %s..., got %s...",
                    *(name, size, dtype, expected[:4].tolist(), arrived[:4].tolist()),
                )
    return faults


def message(rank: int, size: int, dtype: torch.dtype, world: World) -> Tensor:
    """Return what a rank sends: about `size` bytes, divisible by the ranks."""
    count = max(size // dtype.itemsize // world.size, 1) * world.size
    return ((torch.arange(count, device=world.device) + rank) % 3).to(dtype)


def measure(name: str, sizes: Sequence[int], world: World) -> list[dict[str, Any]]:
    """Return time and bandwidth of an operation for each size: means over rounds and ranks."""
    rows = []
    for size in sizes:
        sent = message(world.rank, size, torch.float32, world)
        rounds = 50 if size <= 2**20 else 5
        for warming_up in (True, False):
            wait(world)
            began = time.perf_counter()
            for _ in range(2 if warming_up else rounds):
                OPERATIONS[name].run(sent, world)
            wait(world)
        seconds = world.sum([(time.perf_counter() - began) / rounds])[0] / world.size
        bandwidth = sent.nbytes / seconds / 1e9
        rows.append(
            {
                "operation": name,
                "bytes": sent.nbytes,
                "microseconds": seconds * 1e6,
                "algorithm_gb_s": bandwidth,
                "bus_gb_s": bandwidth * OPERATIONS[name].bus(world.size),
            }
        )
    return rows


def wait(world: World) -> None:
    """Wait for this rank's GPU, which works on its own."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def show(report: dict[str, Any], world: World) -> None:
    """Print the results."""
    for rank, place in enumerate(report["ranks"]):
        print(f"rank {rank}: {place}")
    print(f"\n{'operation':16}{'bytes':>12}{'µs':>12}{'algorithm GB/s':>16}{'bus GB/s':>12}")
    for row in report["speed"]:
        print("{:16}{:>12}{:>12.1f}{:>16.3f}{:>12.3f}".format(*row.values()))
    verdict = f"FAILED: {report['faults']} wrong results" if report["faults"] else "all is right"
    print(f"\n{world.size} ranks on {world.backend}: {verdict}", flush=True)
