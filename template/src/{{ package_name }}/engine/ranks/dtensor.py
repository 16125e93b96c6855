"""Tensors of which each rank has a part: torch's DTensors, which know where in the whole they lie.

Their class is imported only where one is made: that takes a second.
"""

from typing import Any

from torch import Tensor


def is_dtensor(value: Any) -> bool:  # noqa: ANN401 - whatever a checkpoint may hold
    """Return whether this is a part of a tensor."""
    return hasattr(value, "full_tensor")


def full_tensor(tensor: Any) -> Tensor:  # noqa: ANN401 - a Tensor or a DTensor
    """Return all of a tensor of which ranks may have a part each; every rank must call this."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def distribute_like(tensor: Tensor, like: Any) -> Tensor:  # noqa: ANN401 - as is_dtensor
    """Return this rank's part of a tensor that each rank has, cut as another one is.

    Where that other one is no part, or of another shape, it is the tensor itself.
    """
    if not is_dtensor(like) or is_dtensor(tensor) or like.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    copies = DTensor.from_local(tensor.to(like.device), mesh, [Replicate()], run_check=False)
    return copies.redistribute(placements=like.placements)
