"""The training engine. Do not edit this folder: updates change it.

It imports none of your files.

    training.py     what the loop and the hooks use; epochs.py: the steps of an epoch
    updater.py      one update: forward and backward passes, clipping, optimizer steps
    schedule.py     the learning rate
    position.py     how far the training is
    networks.py     networks, their moving averages and optimizers, by name; recompute
    checkpoint.py   the contents of a checkpoint; checkpoint_files.py, shards.py: its files
    weights.py      starts networks with weights of other runs and programs
    foreign.py      safe reads of files that someone else may have made
    evaluate.py     metrics over a dataset, reduced over all ranks
    hooks.py        calls the hooks of plug-ins and of model.py
    inference.py    loads a trained network for predictions
    config.py       the settings that every training has
    checks.py       checks of model.py, data.py and the ranks
    errors.py       error messages of one line
    filesystem.py   safe writes of files
    compiler.py     spares a run the import of PyTorch's compiler
    nested.py       batches of nested tuples, lists and dictionaries
    ranks/          how ranks start, meet, communicate and stop; device; DDP and FSDP
    data/           which samples each rank reads; loading workers; seeds
    run/            the run folder: lock, log, metrics, status, provenance

Your files can import the names below from this package. Later versions keep these names, even
if they move the code to other modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Count as Count
    from .config import Fraction as Fraction
    from .config import Positive as Positive
    from .config import Rate as Rate
    from .config import Settings as Settings
    from .data.stream import ShardStream as ShardStream
    from .errors import UsageError as UsageError
    from .filesystem import write_atomically as write_atomically
    from .nested import split_samples as split_samples
    from .nested import to_device as to_device
    from .ranks.signals import StopRequest as StopRequest
    from .ranks.world import World as World
    from .run.record import record as record
    from .training import Training as Training
    from .updater import Updater as Updater

HOMES = {
    "Count": "config",
    "Fraction": "config",
    "Positive": "config",
    "Rate": "config",
    "Settings": "config",
    "ShardStream": "data.stream",
    "StopRequest": "ranks.signals",
    "Training": "training",
    "Updater": "updater",
    "UsageError": "errors",
    "World": "ranks.world",
    "record": "run.record",
    "split_samples": "nested",
    "to_device": "nested",
    "write_atomically": "filesystem",
}
"""The module of each name. It is imported on first use, so that settings.py does not load torch."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever has the name
    if name not in HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)
