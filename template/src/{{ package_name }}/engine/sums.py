"""Sums over the batches of an evaluation, and then over all ranks."""

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError
from .ranks.device import sum_dtype
from .ranks.world import World


class Sums:
    """What batches add up to, on this rank and then over all."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    def add(self, measured: Mapping[str, Any], weight: int, objects: Mapping[str, Any]) -> None:
        """Add what `measure` returned of a batch."""
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
                # Means over nothing, such as a loss whose labels are all ignored, may be nan.
                tensors[name] = value if weight else value.masked_fill(value.isnan(), 0)
            else:
                raise UsageError(
                    f"measure in model.py returned '{name}' as {type(value).__name__}: return a "
                    "tensor to be summed, or a tuple for the object of this name in metrics"
                )
        for name, total in _to_cpu(tensors).items():
            self.totals[name] = total + self.totals.get(name, 0)

    def over_all_ranks(self, world: World) -> dict[str, Tensor]:
        """Return the sums over all ranks; one that had no sample adds nothing.

        Raises:
            UsageError: on every rank, if ranks measured different things.
        """
        mine = {name: tuple(total.shape) for name, total in self.totals.items()}
        digest = zlib.crc32(repr(sorted(mine.items())).encode())
        highest, lowest = world.maximum([digest, -digest])
        if highest != -lowest:
            shapes = [each for each in world.gather(mine) if each]
            if any(each != shapes[0] for each in shapes):
                raise UsageError(
                    f"measure in model.py returned {shapes[0]} on one rank and "
                    f"{next(each for each in shapes if each != shapes[0])} on another: return the "
                    "same names and shapes for every batch"
                )
            mine = mine or shapes[0]
        names = sorted(mine)
        zeros = torch.zeros((), dtype=torch.float64)
        own = [self.totals.get(name, zeros.expand(mine[name])).reshape(-1) for name in names]
        parts = world.all_reduce(torch.cat(own)).split([each.numel() for each in own])
        found = dict(zip(names, parts, strict=True))
        return {name: found[name].reshape(shape) for name, shape in mine.items()}


def _to_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as float64 on the CPU, by one transfer from the device."""
    device = list(tensors.values())[-1].device
    exact = sum_dtype(device)
    flat = torch.cat([each.to(device, exact).reshape(-1) for each in tensors.values()])
    parts = flat.cpu().double().split([each.numel() for each in tensors.values()])
    return {
        name: part.reshape(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)
    }
