"""The strategies: each rank has a copy of the network (DDP), or a part of it (FSDP).

Under FSDP, parameters, gradients and the state of the optimizer are DTensors (dtensor.py).
"""

from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from inspect import signature
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..config import Settings
from ..errors import UsageError
from .dtensor import full_tensor
from .world import World

MESH_NAMES = ("nodes", "ranks")
"""Of the dimensions of the ranks, with `shard_within` node; otherwise they have one."""
Units = Callable[[nn.Module], Iterable[nn.Module]]


def distribute(network: nn.Module, units: Units, settings: Settings, world: World) -> nn.Module:
    """Put a network on this rank's device, distribute it, and return the module to train with.

    Evaluation and checkpoints use the network itself, which `place` puts there.

    Raises:
        UsageError: a setting needs FSDP, or as `place`.
    """
    for name, value in {"shard_within": "world", "offload": False}.items():
        if settings.strategy != "fsdp" and (found := getattr(settings, name)) != value:
            raise UsageError(
                f"{name} is {found}, which strategy {settings.strategy} does not have: use "
                f"--strategy fsdp, or {name} {value}"
            )
    place(network, units, settings, world)
    trained = any(parameter.requires_grad for parameter in network.parameters())
    called: Any = torch.compile(network) if settings.compile and trained else network
    if settings.strategy != "ddp" or world.size == 1 or not trained:
        return called
    options: dict[str, Any] = {"find_unused_parameters": settings.find_unused_parameters}
    # Buffers are not broadcast at each step: evaluation and checkpoints use those of rank 0.
    # torch 2.13 renamed the option.
    new, old = "forward_sync_buffers", "broadcast_buffers"
    options[new if new in signature(DistributedDataParallel).parameters else old] = False
    first = _WithFirstPass(called)
    replica = DistributedDataParallel(first, gradient_as_bucket_view=True, **options)
    replica().backward()
    replica.zero_grad()
    first.warming_up = False
    return replica


def place(network: nn.Module, units: Units, settings: Settings, world: World) -> None:
    """Put a network on this rank's device; with FSDP and several ranks, only this rank's part.

    FSDP turns its parameters into DTensors, so the optimizer must be built after this.

    Args:
        network: on the CPU.
        units: returns the parts of a network that FSDP gathers one at a time.

    Raises:
        UsageError: FSDP can't shard the network, or not within nodes.
    """
    if settings.strategy == "fsdp" and world.size > 1:
        _shard(network, units, settings, world)
    else:
        network.to(world.device)


class _WithFirstPass(nn.Module):
    """A network with a first forward pass that needs no batch, and changes only DDP's buckets.

    DDP makes its final buckets after the first backward pass of a process, in the order in which
    gradients arrive. On more than two ranks, the rounding of a sum depends on its place in a
    bucket. So the first pass must be the same in a new process and in one that resumes.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.warming_up = network, True

    def forward(self, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the network's own
        if self.warming_up:
            trained = [each for each in self.network.parameters() if each.requires_grad]
            return torch.stack([each.sum().real.float() for each in trained]).sum()
        return self.network(*arguments, **named)


def _shard(network: nn.Module, units: Units, settings: Settings, world: World) -> None:
    """Keep on this rank's device only its part of each parameter.

    FSDP gathers a unit while it computes: first those of `units`, then the rest of the network.
    """
    # Imported here: it takes a second, and DDP does not need it.
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    for parameter in network.parameters():
        parameter.data = parameter.data.contiguous()  # as FSDP needs it
    pinned = world.device.type != "cpu"  # so that copies from and to a GPU run beside it
    offload = CPUOffloadPolicy(pinned) if settings.offload else OffloadPolicy()
    world.mesh = world.mesh or _mesh(settings, world)
    for unit in (*units(network), network):
        # In bf16, parameters are gathered in the dtype to which autocast casts them. A unit with
        # running statistics keeps fp32: batch normalization needs the dtype of its parameters.
        normalizes = any(hasattr(each, "running_mean") for each in unit.modules())
        half = settings.precision == "bf16" and not normalizes
        compute, reduce = (torch.bfloat16, torch.float32) if half else (None, None)
        policy = MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False)
        try:
            fully_shard(unit, mesh=world.mesh, mp_policy=policy, offload_policy=offload)
        except (ValueError, NotImplementedError) as error:
            raise UsageError(
                f"strategy fsdp can't shard {type(unit).__name__} of model.py "
                f"({str(error).splitlines()[0]}): change it, or use --strategy ddp"
            ) from None


def _mesh(settings: Settings, world: World) -> Any:  # noqa: ANN401 - a DeviceMesh
    """Return the ranks in one dimension, or by node and rank: parts then stay within a node.

    Raises:
        UsageError: the nodes have different numbers of ranks, or ranks of a node do not follow
            each other.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    device = world.device.type
    if settings.shard_within == "world" or len(set(world.nodes)) == 1:
        return init_device_mesh(device, (world.size,))
    counts = [(node, len([*ranks])) for node, ranks in groupby(world.nodes)]
    if len(counts) > len(set(world.nodes)) or len({count for _, count in counts}) > 1:
        found = ", ".join(f"{count} on {node}" for node, count in counts)
        raise UsageError(
            f"shard_within is node, but the ranks in their order are {found:.200}: start as many "
            "on each node, those of a node together, or use --shard-within world"
        )
    ranks = torch.arange(world.size).view(len(counts), -1)
    timeout = timedelta(seconds=settings.timeout)
    groups: list[Any] = [
        dist.new_subgroups_by_enumeration(each.tolist(), timeout=timeout)[0]
        for each in (ranks.T, ranks)  # across nodes, and within one
    ]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=MESH_NAMES)


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost sequences of a network, such as transformer blocks."""
    is_sequence = isinstance(network, nn.Sequential | nn.ModuleList)
    for child in network.children():
        # A ModuleList or ModuleDict computes nothing itself.
        if not is_sequence or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from blocks(child)
        elif next(child.parameters(), None) is not None:
            yield child


def parameter_norm(networks: Iterable[nn.Module]) -> Tensor:
    """Return the norm of all parameters; every rank must call this."""
    return full_tensor(
        nn.utils.get_total_norm(p.detach() for network in networks for p in network.parameters())
    )
