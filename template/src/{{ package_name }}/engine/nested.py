"""Functions for nested batches and predictions: tensors in tuples, lists and dictionaries."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:  # noqa: ANN401
    """Return the same nested value with a function applied to each tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(function, part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        make = getattr(value, "_make", type(value))  # a named tuple is made with `_make`
        return make(map_tensors(function, part) for part in value)
    return value


def to_device(batch: Any, device: torch.device) -> Any:  # noqa: ANN401
    """Return a batch with its tensors moved to a device."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


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


def count(value: Any, known: dict[int, int] | None = None) -> int:  # noqa: ANN401
    """Return the number of values in nested dictionaries, lists and tuples.

    A value that is referenced several times counts each time.

    Args:
        value: the nested value.
        known: the counts so far by `id`, for the recursion.
    """
    known = {} if known is None else known
    if id(value) not in known:
        parts = value.values() if isinstance(value, dict) else value
        inside = parts if isinstance(value, dict | list | tuple) else ()
        known[id(value)] = 1 + sum(count(each, known) for each in inside)
    return known[id(value)]


def plain(value: Any) -> Any:  # noqa: ANN401
    """Return a nested value for JSON: each tensor becomes a number or a list of numbers."""
    return map_tensors(Tensor.tolist, value)
