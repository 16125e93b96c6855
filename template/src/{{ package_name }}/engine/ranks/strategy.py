"""The strategies: each rank has a copy of the network (DDP), or a part of it (FSDP).

Under FSDP, parameters, gradients and the state of the optimizer are DTensors (dtensor.py).
"""

from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..config import Settings
from ..errors import UsageError
from .dtensor import full_tensor
from .world import World

Units = Callable[[nn.Module], Iterable[nn.Module]]


def distribute(network: nn.Module, units: Units, settings: Settings, world: World) -> nn.Module:
    """Put a network on this rank's device, distribute it, and return the module to train with.

    Evaluation and checkpoints use the network itself. FSDP turns its parameters into DTensors, so
    the optimizer must be built after this. A single rank keeps the whole network.

    Args:
        network: on the CPU.
        units: returns the parts of a network that FSDP gathers one at a time.
        settings: of the run. world: the ranks.

    Raises:
        UsageError: FSDP can't shard the network.
    """
    if settings.strategy == "fsdp" and world.size > 1:
        _shard(network, units, settings, world)
    network.to(world.device)
    trained = any(parameter.requires_grad for parameter in network.parameters())
    compiled = settings.compile and trained
    called: Any = torch.compile(network) if compiled else network
    if settings.strategy == "ddp" and world.size > 1 and trained:
        called = _replicate(called, settings.find_unused_parameters)
    return called


def _replicate(network: nn.Module, find_unused: bool) -> DistributedDataParallel:
    """Return the network with its gradients averaged over all ranks.

    Buffers are not broadcast at each step: evaluation and checkpoints use those of rank 0.
    """
    # torch 2.13 renamed the option.
    new, old = "forward_sync_buffers", "broadcast_buffers"
    known = signature(DistributedDataParallel).parameters
    options: dict[str, Any] = {new if new in known else old: False}
    called = _WithFirstPass(network)
    replica = DistributedDataParallel(
        called,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
        **options,
    )
    replica().backward()
    replica.zero_grad()
    called.warming_up = False
    return replica


class _WithFirstPass(nn.Module):
    """A network with a first forward pass that needs no batch.

    DDP makes its final buckets after the first backward pass of a process, in the order in which
    gradients arrive. On more than two ranks, the rounding of a sum depends on its place in a
    bucket. So the first pass must be the same in a new process and in one that resumes. This one
    changes nothing but the buckets.
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
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # FSDP needs contiguous parameters.
    for parameter in network.parameters():
        parameter.data = parameter.data.contiguous()
    mesh = init_device_mesh(world.device.type, (world.size,))
    for unit in (*units(network), network):
        # In bf16, parameters are gathered in the dtype to which autocast casts them. A unit with
        # running statistics keeps fp32: batch normalization needs the dtype of its parameters.
        half = settings.precision == "bf16" and not any(
            hasattr(each, "running_mean") for each in unit.modules()
        )
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if half else None,
            reduce_dtype=torch.float32 if half else None,
            cast_forward_inputs=False,
        )
        try:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        except (ValueError, NotImplementedError) as error:
            raise UsageError(
                f"strategy fsdp can't shard {type(unit).__name__} of model.py "
                f"({str(error).splitlines()[0]}): change it, or use --strategy ddp"
            ) from None


def blocks(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the elements of the outermost sequences of a network, such as transformer blocks."""
    for child in network.children():
        if isinstance(network, nn.Sequential | nn.ModuleList) and not isinstance(
            child,
            nn.ModuleList | nn.ModuleDict,  # these compute nothing themselves
        ):
            if next(child.parameters(), None) is not None:
                yield child
        else:
            yield from blocks(child)


def parameter_norm(networks: Iterable[nn.Module]) -> Tensor:
    """Return the norm of all parameters; every rank must call this."""
    return full_tensor(
        nn.utils.get_total_norm(p.detach() for network in networks for p in network.parameters())
    )
