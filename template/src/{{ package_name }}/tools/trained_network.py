"""What `predict` and `evaluate` share: flags, the ranks, the trained network and its dataset."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import tyro
from torch.utils.data import IterableDataset

from ..engine import checkpoint_files, inference
from ..engine.checks import check_data_dir, check_length, parts_of
from ..engine.errors import UsageError
from ..engine.ranks.process_group import be_deterministic, joined
from ..engine.ranks.strategy import place
from ..engine.ranks.world import World
from ..engine.run.logging_setup import set_up_logging
from ..learner import model_class
from ..settings import Settings


@dataclasses.dataclass(frozen=True)
class Flags:
    """The flags that both commands have."""

    run: tyro.conf.Positional[Path]
    """run folder, or one of its checkpoints"""
    split: str = "test"
    """which dataset of data.py: train, validation, test, or validation/NAME for one of several"""
    checkpoint: Literal["best", "latest"] = "best"
    """which checkpoint of the run folder; for any other one, name its file instead of the folder"""
    output: Path | None = None
    """file to write;
    default: a file named after SPLIT, in the run folder or next to the checkpoint"""
    data_dir: str | None = None
    """folder of the dataset's files; default: that of the run"""
    batch_size: int | None = None
    """samples in a batch of each rank; default: the run's test_batch_size"""
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = "auto"
    """device to use, as for train"""
    world_size: int | None = None
    """number of ranks expected; any other is an error"""


@contextmanager
def opened(
    flags: Flags, changes: dict[str, Any], load: Callable[[Settings], Any]
) -> Iterator[tuple[inference.Trained, Any, Path, World]]:
    """Join the other ranks; yield the network, the dataset, the folder for results, the world.

    Args:
        changes: values for some of the run's settings.
        load: returns the dataset for the settings of the run.

    Raises:
        UsageError: a flag is wrong, there is no checkpoint, it does not fit model.py, or the
            dataset is a stream or has no samples.
    """
    if flags.batch_size is not None and flags.batch_size < 1:
        raise UsageError(f"--batch-size is {flags.batch_size}: it must be 1 or more")
    given = {"data_dir": flags.data_dir, "test_batch_size": flags.batch_size}
    changes |= {name: value for name, value in given.items() if value is not None}
    with joined(Settings(device=flags.device, world_size=flags.world_size)) as world:
        set_up_logging(world, all_ranks=False)
        # Only rank 0 looks for the checkpoint: a run that still trains may save another one.
        path = world.on_main(lambda: checkpoint_files.find(flags.run, flags.checkpoint))
        changes |= {"shard_within": "world", "offload": False}  # for any nodes
        trained = inference.load(model_class(), Settings, path, changes)
        for module in trained.evaluated.values():
            place(module, trained.learner.fsdp_units, trained.settings, world)
        trained.device = world.device
        if trained.settings.deterministic:
            be_deterministic()
        check_data_dir(trained.settings)
        dataset = load(trained.settings)
        for name, each in parts_of(dataset, flags.split).items():
            if isinstance(each, IterableDataset):
                raise UsageError(
                    f"the {name} set is a stream, which has no index: choose another --split"
                )
            check_length(name, len(each), world)
        in_run = path.parent.name == "checkpoints"
        yield trained, dataset, path.parent.parent if in_run else path.parent, world
