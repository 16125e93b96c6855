"""DTensors: tensors of which each rank has a part.

Their class is imported only where one is made: the import takes a second.
"""

from typing import Any

from torch import Tensor


def is_dtensor(value: Any) -> bool:  # noqa: ANN401 - whatever a checkpoint may hold
    """Return whether this is a DTensor."""
    return hasattr(value, "full_tensor")


def full_tensor(tensor: Any) -> Tensor:  # noqa: ANN401 - a Tensor or a DTensor
    """Return the whole of a tensor or DTensor; every rank must call this."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local_part(tensor: Any) -> Tensor:  # noqa: ANN401 - a Tensor or a DTensor
    """Return this rank's part of a tensor, or all of it if it is not a DTensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def distribute_like(tensor: Tensor, like: Any) -> Tensor:  # noqa: ANN401 - as is_dtensor
    """Return a tensor that every rank has whole, distributed in the same way as another one.

    If `like` is no DTensor or has another shape, return the tensor itself.
    """
    if not is_dtensor(like) or is_dtensor(tensor) or like.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    copies = DTensor.from_local(tensor.to(like.device), mesh, everywhere, run_check=False)
    return copies.redistribute(placements=like.placements)
