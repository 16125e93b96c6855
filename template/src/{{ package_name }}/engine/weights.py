"""Starts networks with weights from files, also of other programs. No code in the files runs."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint_files import as_checkpoint, complete, errors_explained, find
from .errors import UsageError
from .foreign import read_object, read_tensors

log = logging.getLogger(__name__)

FOLDERS = ("model.safetensors", "pytorch_model.bin")
"""What transformers and accelerate call the file with the weights; each may also have an index."""
KEYS = ("state_dict", "model", "model_state_dict")
"""Under these keys, checkpoints of other programs have the state_dict; Lightning uses the first."""
WRAPPERS = ("module.", "_orig_mod.", "model.")
"""The prefixes of DistributedDataParallel, of torch.compile, and of most modules of Lightning."""


def initialize(modules: Mapping[str, nn.Module], source: str, partial: bool) -> None:
    """Load weights into networks, before the networks are distributed.

    Args:
        modules: the networks.
        source: a path that `read_weights` takes.
        partial: whether to load only the tensors whose names, shapes and kinds of dtype fit.

    Raises:
        UsageError: there is no such file, or its tensors do not fit.
    """
    if not os.path.exists(source):
        raise UsageError(
            f"init_from is {source}, but there is no such file or folder: give a run folder, a "
            "step-*.pt file, or a state_dict in a .pt or .safetensors file"
        )
    path, states = read_weights(Path(source))
    if len(states) == len(modules) == 1:
        states = dict(zip(modules, states.values(), strict=True))
    elif len(states) == 1:  # a file that `export` wrote for several networks, or another one
        (state,) = states.values()
        parts = {name: _below(f"{name}.", state) for name in modules}
        states = parts if sum(map(len, parts.values())) == len(state) else states
    taken = 0
    for name, module in modules.items():
        mine = module.state_dict()
        theirs, lost = unwrapped(states.get(name, {}), mine)
        theirs = with_tied(theirs, mine)
        fitting = {k: v for k, v in theirs.items() if k in mine and _kind(mine[k]) == _kind(v)}
        misfits = ", ".join(key for key in {**mine, **theirs} if key not in fitting)
        if misfits and not partial:
            raise UsageError(
                f"init_from {path} does not fit {name} at {misfits:.200}: set --init-partial to "
                "load only the tensors that fit"
            )
        module.load_state_dict(fitting, strict=False)
        taken += len(fitting)
        found = f"{len(fitting)} of {len(mine)} tensors{misfits and f', without {misfits}'}"
        found += f", whose names begin with {''.join(lost)} there" if lost else ""
        log.info("%s starts from %s: %s", name, path, found)
    if not taken:
        raise UsageError(f"init_from {path} has no tensor that fits model.py: choose another file")


def _kind(value: Any) -> Any:  # noqa: ANN401 - of a state_dict
    """Return what must be equal so that a value can replace another one: shape, kind of dtype."""
    if not isinstance(value, Tensor):
        return type(value)
    if value.is_nested or value.is_meta:
        return None
    kinds = value.is_complex(), value.is_floating_point(), value.is_quantized
    return value.layout, value.shape, kinds


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose names begin with a prefix, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def read_weights(source: Path) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Return a file with weights, and the state_dicts in it by the names of their networks.

    Args:
        source: a run folder, of which the best checkpoint is used; a checkpoint, of this project or
            of another program; a state_dict in a file of torch.save or of safetensors; an index of
            such files; or a folder with one of the FOLDERS.

    Raises:
        UsageError: there is no such file, or it has no weights that can be read.
    """
    if (source / ".metadata").exists():
        raise UsageError(
            f"init_from {source} is a folder of torch.distributed.checkpoint: make one file of it "
            "with python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE"
        )
    names = [name for each in FOLDERS for name in (each, f"{each}.index.json")]
    source = next((source / name for name in names if (source / name).exists()), source)
    if source.name.endswith(".index.json"):
        return source, {"network": _indexed(source)}
    path = find(source)
    with errors_explained(path):
        state = read_tensors(path)
    if isinstance(state, dict) and "networks" not in state:
        state = next((state[key] for key in KEYS if _has_weights(state.get(key))), state)
        if _has_weights(state):
            return path, {"network": state}
    state = complete(as_checkpoint(state, path), path)
    states = state["averages"] or state["networks"]
    if not all(map(_has_names, states.values())):
        raise UsageError(f"init_from {path} has a network without names: choose another file")
    return path, states


def _has_names(state: object) -> bool:
    return isinstance(state, Mapping) and all(isinstance(name, str) for name in state)


def _has_weights(state: Any) -> bool:  # noqa: ANN401 - of a file
    return _has_names(state) and any(isinstance(each, Tensor) for each in state.values())


def _indexed(index: Path) -> dict[str, Any]:
    """Return the tensors of all files that an index names, which lie next to it."""
    with errors_explained(index):
        names = read_object(index.resolve(), {"weight_map": dict})["weight_map"].values()
        if any(not isinstance(name, str) or Path(name).name != name for name in names):
            raise ValueError("it names files of other folders")
    state: dict[str, Any] = {}
    for name in sorted(set(names)):
        with errors_explained(index.parent / name):
            state |= read_tensors((index.parent / name).resolve())
    return state


def unwrapped(
    state: Mapping[str, Any], network: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return a state_dict whose names lack what a wrapper added, and the prefixes that they lost.

    Args:
        state: of a file.
        network: the state_dict of the network.
    """
    lost = []
    for prefix in WRAPPERS * 2:  # in any order
        inside = any(name.startswith(prefix) for name in network)
        if not inside and state and len(_below(prefix, state)) == len(state):
            state = _below(prefix, state)
            lost.append(prefix)
    return dict(state), lost


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


def with_tied(state: Mapping[str, Tensor], network: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state_dict in which tied weights have all of their names, as in the network.

    Args:
        state: the tensors in a file, which may have each tied weight under one name only.
        network: the state_dict of the network.
    """
    first = first_names(network)
    given = {first[name]: tensor for name, tensor in state.items() if name in first}
    return {name: given[first[name]] for name in first if first[name] in given} | dict(state)
