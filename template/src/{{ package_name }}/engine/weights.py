"""Weights of networks in files that other programs read and write: safetensors."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, contiguous_format

from .filesystem import write_atomically


def is_safetensors(path: Path, file: IO[bytes]) -> bool:
    """Return whether an open file is one, by its name or its first bytes; they are read again.

    A file in a cache of downloads has no such name. The bytes are the length of a JSON object, and
    its bracket; the archives and pickles of torch have others.
    """
    start = file.read(9)
    file.seek(0)
    return path.suffix == ".safetensors" or start[8:] == b"{"


def read(path: Path, most: int) -> dict[str, Tensor]:
    """Return the tensors of a file, on the CPU; it can't run code.

    Raises ValueError if there are more than `most`, and what the library raises for damage.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        names = file.keys()
        if len(names) > most:  # to make the tensors would take minutes
            raise ValueError(f"it has more than {most} values")
        return {name: file.get_tensor(name) for name in names}


def write(
    path: Path, states: Mapping[str, Mapping[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write the state_dicts of networks by name; of several, a tensor's name begins with theirs.

    The format has each tensor once: `metadata` then tells of tied weights, as NAME: WRITTEN NAME.
    Each network has its own copy of what several share, so that it can be read without the others.
    Raises OSError, and ValueError for what the format lacks; `path` is then as it was before.
    """
    from safetensors.torch import save

    tied: dict[str, str] = {}
    written: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, state in states.items():
        before = f"{name}." if len(states) > 1 else ""
        for key, first in first_names(state).items():
            if key == first:
                written[before + key] = _plain(before + key, state[key], storages)
            else:
                tied[before + key] = before + first
    # Not by save_file, whose files only their owner can read.
    write_atomically(path, save(written, {**tied, **metadata}))


def _plain(name: str, value: Any, storages: set[int]) -> Tensor:  # noqa: ANN401 - of a state_dict
    """Return a tensor as the format takes it: contiguous, with a storage that is all its own.

    `storages` has the addresses of those that are taken; that of the tensor is added.
    """
    if name == "__metadata__":
        raise ValueError("safetensors has another use for the name __metadata__: rename the tensor")
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is no tensor, which safetensors lacks: {type(value).__name__}")
    if value.layout != torch.strided or value.is_quantized or not _is_known(value.dtype):
        kind = value.dtype if value.layout == torch.strided else value.layout
        raise ValueError(f"{name} is a tensor of {kind}, which safetensors lacks")
    tensor = value.detach().resolve_conj().resolve_neg()
    storage = tensor.untyped_storage()
    whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
    if not whole or storage.data_ptr() in storages:
        tensor = tensor.clone(memory_format=contiguous_format)
    if tensor.numel():
        storages.add(tensor.untyped_storage().data_ptr())
    return tensor


@cache
def _is_known(dtype: torch.dtype) -> bool:
    from safetensors.torch import save

    try:
        save({"tensor": torch.empty(0, dtype=dtype)})
    except Exception:  # it depends on the version of the library
        return False
    return True


def first_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return for each name the first name of the same tensor: tied weights have several names."""
    first: dict[Any, str] = {}
    names = {}
    for name, x in state.items():
        names[name] = name
        # A state_dict may have other values, and sparse tensors have no address.
        if isinstance(x, Tensor) and x.layout == torch.strided and x.numel():
            view = (x.data_ptr(), x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())
            names[name] = first.setdefault(view, name)
    return names


def by_network(state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Return a state that `write` wrote of several networks by their names.

    It is empty if a tensor is of none of them.
    """
    found: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, tensor in state.items():
        name = next((name for name in found if key.startswith(f"{name}.")), None)
        if name is None:
            return {}
        found[name][key.removeprefix(f"{name}.")] = tensor
    return found


def with_tied(state: Mapping[str, Tensor], network: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state with the tensors that a file left out, since the network has them tied."""
    first = first_names(network)
    given = {first[name]: tensor for name, tensor in state.items() if name in first}
    return {name: given[first[name]] for name in first if first[name] in given} | dict(state)
