"""The strategies: each rank has a copy of the network (DDP) or a part of it (FSDP).

With FSDP, parameters, gradients and optimizer states are DTensors: each rank has a part of them.
The class DTensor is imported only where it is needed, since its import takes a second.
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

from ..compiler import spared
from ..config import Settings
from ..errors import UsageError
from .device import HALF
from .world import World

Units = Callable[[nn.Module], Iterable[nn.Module]]


def distribute(network: nn.Module, units: Units, settings: Settings, world: World) -> nn.Module:
    """Move a network to this rank's device, distribute it, and return the module to train with.

    Training calls the returned module, such as DistributedDataParallel. Evaluations and checkpoints
    use `network` itself, which `place` moves to the device.

    Raises:
        UsageError: a setting needs another one, or FSDP can't shard the network.
    """
    for name, value in {"shard_within": "world", "offload": False}.items():
        if settings.strategy != "fsdp" and (found := getattr(settings, name)) != value:
            raise UsageError(
                f"{name} is {found}, which strategy {settings.strategy} does not have: use "
                f"--strategy fsdp, or {name} {value}"
            )
    if settings.compile_mode != "default" and not settings.compile:
        raise UsageError(f"compile_mode is {settings.compile_mode}, which needs --compile")
    place(network, units, settings, world)
    trained = any(parameter.requires_grad for parameter in network.parameters())
    called: Any = network
    if settings.compile and trained:
        called = torch.compile(network, mode=settings.compile_mode)
    if settings.strategy != "ddp" or world.size == 1 or not trained:
        return called
    options: dict[str, Any] = {"find_unused_parameters": settings.find_unused_parameters}
    # There is no need to broadcast buffers at each step, since evaluations and checkpoints use the
    # buffers of rank 0. torch 2.13 renamed the option.
    new, old = "forward_sync_buffers", "broadcast_buffers"
    options[new if new in signature(DistributedDataParallel).parameters else old] = False
    first = _WithFirstPass(called)
    with spared(DistributedDataParallel):
        replica = DistributedDataParallel(first, gradient_as_bucket_view=True, **options)
        replica().backward()
    replica.zero_grad()
    first.warming_up = False
    return replica


def place(network: nn.Module, units: Units, settings: Settings, world: World) -> None:
    """Move a network to this rank's device; with FSDP and several ranks, only this rank's part.

    FSDP turns the parameters into DTensors, so build the optimizer after this call.

    Args:
        network: on the CPU.
        units: returns the modules of a network that FSDP gathers one at a time.

    Raises:
        UsageError: FSDP can't shard the network, or can't shard it within nodes.
    """
    if settings.strategy == "fsdp" and world.size > 1:
        _shard(network, units, settings, world)
    else:
        network.to(world.device)


class _WithFirstPass(nn.Module):
    """A network whose first forward pass needs no batch, and only lets DDP form its buckets.

    DDP forms its final buckets after the first backward pass of a process, in the order in which
    the gradients arrive. On more than two ranks, the rounding of a gradient depends on its place
    in a bucket. So the first pass must be the same in a new process and in a resumed one.
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
    """Keep only this rank's part of each parameter on its device.

    FSDP gathers the full parameters of a module only while that module computes. Each module of
    `units` is gathered on its own, and the rest of the network together.
    """
    # Imported here, since the import takes a second and DDP does not need it.
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    for parameter in network.parameters():
        parameter.data = parameter.data.contiguous()  # as FSDP needs it
    pinned = world.device.type != "cpu"  # so that copies overlap with the GPU's work
    offload = CPUOffloadPolicy(pinned) if settings.offload else OffloadPolicy()
    world.mesh = world.mesh or _mesh(settings, world)
    for unit in (*units(network), network):
        # Parameters are gathered in bf16 or fp16, the dtype to which autocast would cast them.
        # Modules with running statistics stay in fp32: batch normalization needs statistics and
        # parameters of the same dtype.
        normalizes = any(hasattr(each, "running_mean") for each in unit.modules())
        compute = None if normalizes else HALF.get(settings.precision)
        reduce = compute and torch.float32
        policy = MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False)
        try:
            fully_shard(unit, mesh=world.mesh, mp_policy=policy, offload_policy=offload)
        except (ValueError, NotImplementedError) as error:
            raise UsageError(
                f"strategy fsdp can't shard {type(unit).__name__} of model.py "
                f"({str(error).splitlines()[0]}): change it, or use --strategy ddp"
            ) from None


def _mesh(settings: Settings, world: World) -> Any:  # noqa: ANN401 - a DeviceMesh
    """Return the device mesh: one dimension; or two, nodes and ranks, to shard within each node.

    Raises:
        UsageError: the nodes have different numbers of ranks, or the ranks of a node are not
            consecutive.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    device = world.device.type
    if settings.shard_within == "world" or len(set(world.nodes)) == 1:
        return init_device_mesh(device, (world.size,))
    counts = [(node, len([*ranks])) for node, ranks in groupby(world.nodes)]
    if len(counts) > len(set(world.nodes)) or len({count for _, count in counts}) > 1:
        found = ", ".join(f"{count} on {node}" for node, count in counts)
        raise UsageError(
            f"shard_within is node, but the ranks in their order are {found:.200}: start the same "
            "number on each node, in the order of the nodes, or use --shard-within world"
        )
    ranks = torch.arange(world.size).view(len(counts), -1)
    timeout = timedelta(seconds=settings.timeout)
    groups: list[Any] = [
        dist.new_subgroups_by_enumeration(each.tolist(), timeout=timeout)[0]
        for each in (ranks.T, ranks)  # groups across nodes, and groups within each node
    ]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=("nodes", "ranks"))


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in the outermost sequences of a network, such as transformer blocks.

    A sequence is an nn.Sequential or an nn.ModuleList.
    """
    is_sequence = isinstance(network, nn.Sequential | nn.ModuleList)
    for child in network.children():
        # A ModuleList or ModuleDict has no forward pass, so FSDP can't gather it as a unit.
        if not is_sequence or isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from blocks(child)
        elif next(child.parameters(), None) is not None:
            yield child


def parameter_norm(networks: Iterable[nn.Module]) -> Tensor:
    """Return the norm of all parameters together, a scalar; every rank calls this."""
    return full_tensor(
        nn.utils.get_total_norm(p.detach() for network in networks for p in network.parameters())
    )


def is_dtensor(value: Any) -> bool:  # noqa: ANN401 - whatever a checkpoint may hold
    """Return whether a value is a DTensor."""
    return hasattr(value, "full_tensor")


def full_tensor(tensor: Any) -> Tensor:  # noqa: ANN401 - a Tensor or a DTensor
    """Return the full tensor of a DTensor, or a plain tensor unchanged; every rank calls this."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local_part(tensor: Any) -> Tensor:  # noqa: ANN401 - a Tensor or a DTensor
    """Return this rank's part of a DTensor, or a plain tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor
