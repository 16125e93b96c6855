"""Reads and writes the weights of networks as safetensors, which other programs use, too."""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, contiguous_format

from .filesystem import write_atomically


def is_safetensors(path: Path, file: IO[bytes]) -> bool:
    """Return whether an open file is a safetensors file, by its name or its first bytes.

    A file in a cache of downloads may have another name. A safetensors file begins with 8 bytes for
    the length of a JSON object, and then the object's bracket. The archives and pickles of torch
    begin with other bytes. Afterwards, the file is at its start again.
    """
    start = file.read(9)
    file.seek(0)
    return path.suffix == ".safetensors" or start[8:] == b"{"


def read(path: Path, most: int) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, on the CPU. The file can't run code.

    Raises:
        ValueError: the file has more than `most` tensors.
        Exception: of the library, if the file is damaged.
    """
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        names = file.keys()
        if len(names) > most:  # making so many tensors would take minutes
            raise ValueError(f"it has more than {most} values")
        return {name: file.get_tensor(name) for name in names}


def write(
    path: Path, states: Mapping[str, Mapping[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Write the state_dicts of networks to a safetensors file.

    The format stores each tensor only once. For tied weights, the metadata maps each further name
    to the name that is stored. A tensor that several networks share is stored for each of them, so
    that each network can be read without the others.

    Args:
        path: the file. After an error, it is unchanged.
        states: the state_dict of each network by name. With several networks, the names of tensors
            begin with the name of their network.
        metadata: more entries for the metadata.

    Raises:
        OSError: the file can't be written.
        ValueError: a value is not a tensor that the format supports.
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
    # save_file of safetensors would write a file that only its owner can read.
    write_atomically(path, save(written, {**tied, **metadata}))


def _plain(name: str, value: Any, storages: set[int]) -> Tensor:  # noqa: ANN401 - of a state_dict
    """Return a tensor as the format needs it: contiguous, and with its own storage.

    Args:
        name: of the tensor, for error messages.
        value: a value of a state_dict.
        storages: the addresses of the storages of earlier tensors; the new one is added.

    Raises:
        ValueError: the value is not a tensor that the format supports.
    """
    if name == "__metadata__":
        raise ValueError("safetensors has another use for the name __metadata__: rename the tensor")
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, but safetensors holds only tensors")
    if value.layout != torch.strided or value.is_quantized or not _is_known(value.dtype):
        kind = value.dtype if value.layout == torch.strided else value.layout
        raise ValueError(f"{name} is a tensor of {kind}, which safetensors does not support")
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
    except Exception:  # its class depends on the version of the library
        return False
    return True


def first_names(state: Mapping[str, Any]) -> dict[str, str]:
    """Return for each name the first name of the same tensor. Tied weights have several names."""
    first: dict[Any, str] = {}
    names = {}
    for name, x in state.items():
        names[name] = name
        # A state_dict may have values that are not tensors, and sparse tensors have no address.
        if isinstance(x, Tensor) and x.layout == torch.strided and x.numel():
            view = (x.data_ptr(), x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())
            names[name] = first.setdefault(view, name)
    return names


def by_network(state: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, dict[str, Tensor]]:
    """Return the state_dict of each network, from a file that `write` wrote for several networks.

    Args:
        state: the tensors in the file by name.
        names: the names of the networks.

    Returns:
        The state_dicts by the networks' names; an empty dictionary if a tensor belongs to none of
        these networks.
    """
    found: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, tensor in state.items():
        name = next((name for name in found if key.startswith(f"{name}.")), None)
        if name is None:
            return {}
        found[name][key.removeprefix(f"{name}.")] = tensor
    return found


def with_tied(state: Mapping[str, Tensor], network: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict in which tied weights have all of their names, as in the network.

    Args:
        state: the tensors in a file, which may have each tied weight under one name only.
        network: the state_dict of the network.
    """
    first = first_names(network)
    given = {first[name]: tensor for name, tensor in state.items() if name in first}
    return {name: given[first[name]] for name in first if first[name] in given} | dict(state)
