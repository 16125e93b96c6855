"""Writes a trained network as a graph in a file: `python -m <package> export RUN_DIR`."""

import dataclasses
import logging
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
import tyro

from .. import data
from ..engine.checks import check_data_dir
from ..engine.config import read_flags
from ..engine.errors import UsageError
from ..engine.nested import map_tensors
from ..learner import model_class
from . import program

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Flags:
    """Write a trained network as a graph, which runs without this project's code."""

    run: tyro.conf.Positional[Path]
    """run folder, or one of its checkpoints"""
    output: Path = Path("network.pt2")
    """file to write: .pt2 for torch.export.load, or .onnx (first pip install onnx onnxscript)"""
    checkpoint: Literal["best", "latest"] = "best"
    """which checkpoint of the run folder"""
    network: str | None = None
    """name of the network to write, if model.py builds several"""
    data_dir: str | None = None
    """folder of the dataset's files, from which two samples are read; else that of the run"""


def main(argv: Sequence[str]) -> int:
    """Write the file; return 0.

    Raises:
        UsageError: a flag is wrong, the file can't be written, or torch can't make a graph of the
            network.
    """
    flags = read_flags(Flags, argv, program("export"))
    if flags.output.suffix not in (".pt2", ".onnx"):
        raise UsageError(f"--output is {flags.output}: end its name in .pt2 or .onnx")
    if flags.output.suffix == ".onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise UsageError("ONNX needs two more packages: pip install onnx onnxscript")
    trained = model_class().load(flags.run, which=flags.checkpoint)
    network = trained.networks
    if isinstance(network, dict):
        if flags.network not in network:
            raise UsageError(f"--network is {flags.network}: choose one of {', '.join(network)}")
        network = network[flags.network]
    data_dir = flags.data_dir or trained.settings.data_dir
    settings = dataclasses.replace(trained.settings, data_dir=data_dir)
    check_data_dir(settings)
    inputs = trained.learner.inputs(trained.example(data.load(settings).test, 2))
    # The graph takes batches of any size.
    auto = torch.export.Dim.AUTO
    sizes = map_tensors(lambda tensor: {0: auto} if tensor.dim() else None, inputs)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # about future changes of torch
            graph = torch.export.export(network, inputs, dynamic_shapes=sizes)
            if flags.output.suffix == ".onnx":
                torch.onnx.export(graph, f=str(flags.output), verbose=False)
            else:
                torch.export.save(graph, flags.output)
    except Exception as error:  # torch.export does not document what it raises
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"can't write {flags.output} ({reason}): if it is the folder, choose another --output; "
            "if torch can't make a graph of the network, let inputs in model.py return the "
            "arguments of its forward, or use Model.load instead"
        ) from None
    log.info("the network of step %d is in %s", trained.step, flags.output)
    return 0
