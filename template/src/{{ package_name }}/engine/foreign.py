"""Finds the weights in files and folders of other programs. No code in them runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from .checkpoint_files import as_checkpoint, complete, errors_explained, find, read_file
from .errors import UsageError
from .filesystem import read_object

FOLDERS = ("model.safetensors", "pytorch_model.bin")
"""What transformers and accelerate call the file with the weights; each may also have an index."""
KEYS = ("state_dict", "model", "model_state_dict")
"""Under these keys, checkpoints of other programs have the state_dict; Lightning uses the first."""
WRAPPERS = ("module.", "_orig_mod.", "model.")
"""The prefixes of DistributedDataParallel, of torch.compile, and of most modules of Lightning."""


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
        state = read_file(path)
    if isinstance(state, dict) and "networks" not in state:
        state = next((state[key] for key in KEYS if _has_weights(state.get(key))), state)
        if _has_weights(state):
            return path, {"network": state}
    state = complete(as_checkpoint(state, path), path, lambda *_: None)
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
            state |= read_file((index.parent / name).resolve())
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
        if not inside and state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
            lost.append(prefix)
    return dict(state), lost
