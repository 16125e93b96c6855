"""Writes a trained network for other programs: `python -m <package> export RUN_DIR`."""

import dataclasses
import json
import logging
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any, Literal

import torch
import tyro
from safetensors.torch import save
from torch import Tensor, contiguous_format

from .. import data
from ..engine.checks import check_data_dir, check_pretrained
from ..engine.config import PATHS, read_flags
from ..engine.errors import UsageError
from ..engine.filesystem import remove, write_atomically
from ..engine.foreign import read_object
from ..engine.inference import Trained
from ..engine.nested import map_tensors
from ..engine.run.provenance import hidden
from ..engine.weights import first_names
from ..learner import model_class
from . import program

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Flags:
    """Write a trained network as weights or a graph, for programs without this project's code."""

    run: tyro.conf.Positional[Path]
    """run folder, or one of its checkpoints"""
    output: Path = Path("network.pt2")
    """file to write; NAME.safetensors: the weights;
    NAME.pt2: a graph that torch.export.load reads;
    NAME.onnx: a graph as ONNX (first pip install onnx onnxscript);
    NAME: a folder that from_pretrained of transformers loads"""
    checkpoint: Literal["best", "latest"] = "best"
    """which checkpoint of the run folder"""
    network: str | None = None
    """name of the network to write, if model.py builds several; default: all, for .safetensors"""
    data_dir: str | None = None
    """folder of the dataset's files; a graph needs two samples; default: that of the run"""


def main(argv: Sequence[str]) -> int:
    """Write the file or folder; return 0.

    Raises:
        UsageError: a flag is wrong, the file can't be written, torch can't make a graph of the
            network, or it has no `save_pretrained`.
    """
    flags = read_flags(Flags, argv, program("export"))
    kind = flags.output.suffix
    if kind not in WRITERS:
        raise UsageError(
            f"--output is {flags.output}: end its name in .safetensors, .pt2 or .onnx, or "
            "for a folder in none of them"
        )
    if kind == ".onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise UsageError("ONNX needs two more packages: pip install onnx onnxscript")
    if not kind and flags.output.exists():
        raise UsageError(f"{flags.output} exists: choose another folder with --output")
    trained = model_class().load(flags.run, which=flags.checkpoint)
    if flags.network and flags.network not in trained.evaluated:
        raise UsageError(f"--network is {flags.network}: choose one of {_names(trained)}")
    WRITERS[kind](trained, flags)
    log.info("the network of step %d is in %s", trained.step, flags.output)
    return 0


def _names(trained: Trained) -> str:
    return ", ".join(trained.evaluated)


# -- weights --------------------------------------------------------------------------------------


def _write_weights(trained: Trained, flags: Flags) -> None:
    """Write the state_dict of all networks, or of the chosen one."""
    chosen = [flags.network] if flags.network else [*trained.evaluated]
    states = {name: trained.evaluated[name].state_dict() for name in chosen}
    with _errors_explained(flags.output):
        write_safetensors(flags.output, states, _metadata(trained))


def write_safetensors(
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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of quantized tensors
            save({"empty": torch.empty(0, dtype=value.dtype, layout=value.layout)})
    except Exception:  # its class depends on the version of the library
        kind = value.dtype if value.layout == torch.strided else value.layout
        raise ValueError(
            f"{name} is a tensor of {kind}, which safetensors does not support"
        ) from None
    tensor = value.detach().resolve_conj().resolve_neg()
    storage = tensor.untyped_storage()
    whole = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes
    if not whole or storage.data_ptr() in storages:
        tensor = tensor.clone(memory_format=contiguous_format)
    storages.add(tensor.untyped_storage().data_ptr())
    return tensor


def _metadata(trained: Trained) -> dict[str, str]:
    """Return facts about the origin of the file, without paths and without possible secrets."""
    settings, position = trained.settings, trained.position
    told = {k: v for k, v in dataclasses.asdict(settings).items() if k not in PATHS}
    commit = None
    with suppress(OSError, ValueError):  # a copy of a checkpoint has no run folder around it
        facts = read_object(trained.path.parent.parent / "provenance.json", {"git": dict})
        commit = facts["git"].get("commit") if "git" in facts else None
    values = {
        "format": "pt",  # transformers reads only this format
        "package": __package__.partition(".")[0],
        "torch": torch.__version__,
        "run": settings.run_dir and f"{settings.experiment}/{Path(settings.run_dir).name}",
        "step": trained.step,
        "best_metric": trained.learner.best[0],
        "best_value": position.best_score,
        "best_step": position.best_step,
        "commit": commit,
        # Secrets in the values are hidden before JSON changes how they are written.
        "settings": json.dumps(_public(told), ensure_ascii=False, default=str),
    }
    return {name: hidden(str(value)) for name, value in values.items() if value is not None}


def _public(value: Any) -> Any:  # noqa: ANN401 - of the settings
    """Return a value without secrets, and without the paths in dictionaries and lists."""
    match value:
        case Mapping():
            return {
                hidden(str(k)): _public(each) for k, each in value.items() if not _is_path(each)
            }
        case list() | tuple() | set() | frozenset():
            return [_public(each) for each in value if not _is_path(each)]
        case str():
            return hidden(value)
    return value


def _is_path(value: object) -> bool:
    named = isinstance(value, str) and value.startswith(("/", "~", "$"))
    return named or isinstance(value, PurePath)


def _write_folder(trained: Trained, flags: Flags) -> None:
    """Write a new folder with the method `save_pretrained` of what `pretrained` returns."""
    parts = check_pretrained(trained.learner.pretrained(trained.networks))
    with _errors_explained(flags.output), _aside(flags.output) as unfinished:
        for part in parts:
            part.save_pretrained(unfinished)
        os.replace(unfinished, flags.output)


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """Make a temporary folder next to a path, to write there first; remove it at the end."""
    folder = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    folder.mkdir()
    try:
        yield folder
    finally:
        remove(folder)


@contextmanager
def _errors_explained(path: Path) -> Iterator[None]:
    try:
        yield
    except (UsageError, ModuleNotFoundError):
        raise
    except Exception as error:  # save_pretrained may raise any exception
        if isinstance(error, OSError) and error.strerror:
            reason = f"{error.strerror}; choose another --output"
            raise UsageError(f"can't write {path}: {reason}") from None
        raise UsageError(f"can't write {path}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return the text of an error as one line, cut if it is long."""
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"


# -- a graph --------------------------------------------------------------------------------------


def _write_graph(trained: Trained, flags: Flags) -> None:
    """Write the network as torch.export traces it, in torch's own format or as ONNX."""
    if flags.network is None and len(trained.evaluated) > 1:
        raise UsageError(f"--network is missing: choose one of {_names(trained)}")
    network = trained.evaluated[flags.network or next(iter(trained.evaluated))]
    data_dir = flags.data_dir or trained.settings.data_dir
    settings = dataclasses.replace(trained.settings, data_dir=data_dir)
    check_data_dir(settings)
    inputs = trained.learner.inputs(trained.example(data.load(settings).test, 2))
    # The graph takes batches of any size.
    auto = torch.export.Dim.AUTO
    sizes = map_tensors(lambda tensor: {0: auto} if tensor.dim() else None, inputs)
    try:
        with warnings.catch_warnings(), torch.no_grad(), _aside(flags.output) as folder:
            warnings.simplefilter("ignore")  # warnings about future changes of PyTorch
            graph = torch.export.export(network, inputs, dynamic_shapes=sizes)
            path = folder / flags.output.name
            if path.suffix == ".onnx":
                torch.onnx.export(graph, f=str(path), verbose=False)
            else:
                torch.export.save(graph, path)
            # An ONNX file may have its weights in a second file, NAME.onnx.data. Move that first.
            for each in sorted(folder.iterdir(), reverse=True):
                os.replace(each, flags.output.with_name(each.name))
    except Exception as error:  # torch.export does not document what it raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"can't write {flags.output} ({reason}): if it is the folder, choose another --output; "
            "if torch can't make a graph of the network, let inputs in model.py return the "
            "arguments of its forward, or use Model.load instead"
        ) from None


WRITERS = {
    "": _write_folder,
    ".safetensors": _write_weights,
    ".pt2": _write_graph,
    ".onnx": _write_graph,
}
