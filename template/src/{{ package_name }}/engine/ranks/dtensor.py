"""Functions for DTensors, the tensors of which each rank has a part.

The class DTensor is imported only where it is needed, since its import takes a second.
"""

from typing import Any

from torch import Tensor


def is_dtensor(value: Any) -> bool:  # noqa: ANN401 - whatever a checkpoint may hold
    """Return whether a value is a DTensor."""
    return hasattr(value, "full_tensor")


def full_tensor(tensor: Any) -> Tensor:  # noqa: ANN401 - a Tensor or a DTensor
    """Return the full tensor of a DTensor, or a plain tensor unchanged; every rank calls this."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def local_part(tensor: Any) -> Tensor:  # noqa: ANN401 - a Tensor or a DTensor
    """Return this rank's part of a DTensor, or a plain tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def distribute_like(tensor: Tensor, like: Any) -> Tensor:  # noqa: ANN401 - a Tensor or a DTensor
    """Distribute a tensor over the ranks in the same way as `like`.

    Args:
        tensor: the full tensor, the same on every rank.
        like: a DTensor of the same shape; otherwise `tensor` is returned unchanged.
    """
    if not is_dtensor(like) or is_dtensor(tensor) or like.shape != tensor.shape:
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    everywhere = [Replicate()] * mesh.ndim
    copies = DTensor.from_local(tensor.to(like.device), mesh, everywhere, run_check=False)
    return copies.redistribute(placements=like.placements)
