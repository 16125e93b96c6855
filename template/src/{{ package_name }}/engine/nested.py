"""Functions for nested batches and predictions: tensors in tuples, lists and dictionaries."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError

KeyPath = tuple[Any, ...]  # the keys and indices that lead to a value inside a nested one


def each_leaf(function: Callable[[KeyPath, Any], Any], value: Any, keys: KeyPath = ()) -> Any:  # noqa: ANN401
    """Apply a function to each value inside nested dictionaries, lists and tuples.

    Args:
        function: takes the key path of a value, and the value; returns the new value.
        value: the nested dictionaries, lists and tuples.
        keys: the key path of `value` itself, for the recursion.

    Returns:
        The same nested dictionaries, lists and tuples with the new values.
    """
    if isinstance(value, Mapping):
        # A copy keeps the attribute `_metadata` of a state_dict.
        replaced = copy(value) if isinstance(value, dict) else dict(value)
        for key, each in value.items():
            replaced[key] = each_leaf(function, each, (*keys, key))
        return replaced
    if isinstance(value, tuple | list):
        make = getattr(value, "_make", type(value))  # a named tuple is made with `_make`
        return make(each_leaf(function, each, (*keys, i)) for i, each in enumerate(value))
    return function(keys, value)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:  # noqa: ANN401
    """Return the same nested value with a function applied to each tensor."""
    return each_leaf(lambda _, leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def to_device(batch: Any, device: torch.device) -> Any:  # noqa: ANN401
    """Return a batch with its tensors moved to a device.

    Python does not wait for a copy to a GPU; with NVIDIA and AMD, this needs pinned memory. It does
    wait for a copy to the CPU, because it would read that memory too early.
    """

    def moved(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.is_cpu and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=device.type != "cpu")

    return map_tensors(moved, batch)


def to_cpu(value: Any) -> Any:  # noqa: ANN401
    """Return a batch or predictions with their tensors detached and moved to the CPU."""
    return map_tensors(lambda tensor: tensor.detach().cpu(), value)


def length(batch: Any) -> int:  # noqa: ANN401
    """Return the number of samples in a batch: the rows of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch)
    if not isinstance(batch, Iterable):
        raise UsageError(
            f"collate in data.py returned {batch!s:.80}: return a batch of tensors in a tuple, "
            "list or dictionary, or override batch_weight in model.py"
        )
    parts = list(batch.values() if isinstance(batch, Mapping) else batch)
    nested = [part for part in parts if isinstance(part, Tensor | Mapping | tuple | list)]
    return length(nested[0]) if nested else len(parts)


def split_samples(value: Any, samples: int | None = None) -> Iterator[Any]:  # noqa: ANN401
    """Yield the predictions for each sample: the same nested value, with one row of every tensor.

    Args:
        value: the nested value.
        samples: the number of rows that each tensor must have; if None, that of the first tensor.

    Raises:
        IndexError: there is no tensor, or one has another number of rows.
    """
    rows = list[int]()
    map_tensors(lambda tensor: rows.append(len(tensor) if tensor.dim() else 0), value)
    if not any(rows) or {*rows} != {rows[0] if samples is None else samples}:
        raise IndexError(f"the tensors have {rows} rows")
    for number in range(rows[0]):
        yield map_tensors(itemgetter(number), value)
