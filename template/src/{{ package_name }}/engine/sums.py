"""Sums of what `measure` returns, over the batches of an evaluation and over all ranks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError
from .ranks.device import sum_dtype
from .ranks.world import World


class Sums:
    """Sums by name, on this rank and over all ranks."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    def add(self, measured: Mapping[str, Any], weight: int, objects: Mapping[str, Any]) -> None:
        """Add what `measure` returned for a batch.

        Args:
            measured: tensors by name, and tuples: the arguments of `update` of these objects.
            weight: of the batch.
            objects: what `metrics` returned.

        Raises:
            UsageError: `measured` has values of other types.
        """
        if not isinstance(measured, Mapping):
            raise UsageError(
                f"measure in model.py returned {measured!s:.80}: return a dictionary of tensors"
            )
        tensors = {"weight": torch.tensor(weight, dtype=torch.float64)}
        for name, value in measured.items():
            if isinstance(value, tuple) and name in objects:
                objects[name].update(*value)
            elif isinstance(value, Tensor) and name != "weight":
                value = value.detach()
                # The mean loss of a batch may be nan if all of its labels are ignored.
                tensors[name] = value if weight else value.masked_fill(value.isnan(), 0)
            else:
                raise UsageError(
                    f"measure in model.py returned '{name}' as {type(value).__name__}: return a "
                    "tensor to be summed, or a tuple for the object of this name in metrics"
                )
        for name, total in _to_cpu(tensors).items():
            self.totals[name] = total + self.totals.get(name, 0)

    def over_all_ranks(self, world: World) -> dict[str, Tensor]:
        """Return the sums over all ranks; a rank without samples adds nothing.

        Raises:
            UsageError: on every rank, if ranks measured different names or shapes.
        """
        mine = {name: tuple(total.shape) for name, total in self.totals.items()}
        shapes, *others = [each for each in world.gather(mine) if each]
        for other in others:
            if other != shapes:
                raise UsageError(
                    f"measure in model.py returned {shapes} on one rank and {other} on another: "
                    "return the same names and shapes for every batch"
                )
        zeros = torch.zeros((), dtype=torch.float64)
        own = [self.totals.get(name, zeros.expand(shape)) for name, shape in shapes.items()]
        flat = world.all_reduce(torch.cat([each.reshape(-1) for each in own]))
        parts = flat.split([each.numel() for each in own])
        return {
            name: part.reshape(shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }


def _to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as float64 on the CPU, with one copy from the device for all."""
    device = list(tensors.values())[-1].device
    exact = sum_dtype(device)
    flat = torch.cat([each.to(device, exact).reshape(-1) for each in tensors.values()])
    parts = flat.cpu().double().split([each.numel() for each in tensors.values()])
    return {
        name: part.reshape(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)
    }
