"""Weights of networks in files that other programs read and write: safetensors."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

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
    Raises OSError; `path` is then as it was before.
    """
    from safetensors.torch import save

    several = len(states) > 1
    state = {
        f"{name}.{key}" if several else key: tensor.detach()
        for name, each in states.items()
        for key, tensor in each.items()
    }
    first = first_names(state)
    tied = {name: other for name, other in first.items() if name != other}
    # A copy of what is not contiguous, or is a part of a larger tensor.
    written = {
        name: x if _is_whole(x) else x.clone(memory_format=contiguous_format)
        for name, x in state.items()
        if name not in tied
    }
    # Not by save_file, whose files only their owner can read.
    write_atomically(path, save(written, {**tied, **metadata}))


def _is_whole(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def first_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return for each name the first name of the same tensor: tied weights have several names."""
    first: dict[Any, str] = {}
    return {
        name: first.setdefault((x.data_ptr(), x.dtype, x.shape, x.stride()), name)
        if x.numel()
        else name
        for name, x in state.items()
    }


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
