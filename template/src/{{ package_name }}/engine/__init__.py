"""Not yours: `copier update` replaces this folder. It imports nothing of yours.

    updater.py      an optimizer step: forward and backward passes, clipping
    schedule.py     the learning rate; position.py: how far the training is
    networks.py     networks, their moving averages and optimizers, by name
    recompute.py    activations that the backward pass computes again
    checkpoint.py   what a checkpoint holds; checkpoint_files.py, shards.py: its files
    weights.py      files of safetensors, for and from other programs
    evaluate.py     metrics over a dataset, of all ranks
    hooks.py        the hooks of model.py, and what they get
    inference.py    use of a trained network
    config.py       the settings of every training
    checks.py       checks of model.py, of data.py and of the ranks
    torchrun.py     torchrun, with the signals and exit codes of a job
    torch_private.py  what this project uses of PyTorch that a new version may change
    errors.py       errors of one line; filesystem.py: safe files; nested.py: batches of any nesting
    ranks/          how ranks start, meet, talk and stop; device; DDP and FSDP
    data/           which samples each rank reads; loading workers; seeds
    run/            the run folder: its lock, log, metrics, status, provenance; a message at its end

The names below are for your files. They stay when a later version moves what is in here.
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
    from .hooks import Training as Training
    from .nested import split_samples as split_samples
    from .ranks.signals import StopRequest as StopRequest
    from .ranks.world import World as World
    from .run.record import record as record
    from .updater import Updater as Updater

HOMES = {
    "Count": "config",
    "Fraction": "config",
    "Positive": "config",
    "Rate": "config",
    "Settings": "config",
    "ShardStream": "data.stream",
    "StopRequest": "ranks.signals",
    "Training": "hooks",
    "Updater": "updater",
    "UsageError": "errors",
    "World": "ranks.world",
    "record": "run.record",
    "split_samples": "nested",
    "write_atomically": "filesystem",
}
"""The module of each name. It is imported when the name is used: settings.py needs no torch."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever has the name
    if name not in HOMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)
