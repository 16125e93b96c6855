"""Checks the return values of model.py and data.py, and that all ranks have the same settings."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy
from torch import Tensor
from torch.utils.data import Dataset

from .config import Settings
from .errors import UsageError
from .ranks.world import World

log = logging.getLogger(__name__)

Sets = Dataset | Mapping[str, Dataset]
SPLITS = ("train", "validation", "test")


@contextmanager
def rehearsed(name: str) -> Iterator[None]:
    """Turn an exception of the user's code into a UsageError, and log its traceback.

    Args:
        name: of the function and its file.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        log.exception("%s was called with a few samples, before the first step", name)
        raise UsageError(
            f"{name} failed with {type(error).__name__}: {error}; before the first step, it gets a "
            "few samples: correct it, or let it work for so few"
        ) from None


def check_pretrained(value: Any) -> tuple[Any, ...]:  # noqa: ANN401 - whatever it returned
    """Return the objects that `pretrained` returned; raise UsageError if one can't be saved."""
    parts = value if isinstance(value, tuple) else (value,)
    for part in parts:
        if not hasattr(part, "save_pretrained"):
            raise UsageError(
                f"pretrained in model.py returned {type(part).__name__}, which has no "
                "save_pretrained: return a network of transformers, or export to NAME.safetensors"
            )
    return parts


def check_loss(value: Any) -> Tensor:  # noqa: ANN401 - whatever `loss` returned
    """Return the value if it is a tensor of shape (); otherwise raise UsageError."""
    if not isinstance(value, Tensor) or value.dim():
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else value
        raise UsageError(
            f"the loss in model.py returned {what!s:.80}: it must be the mean over the batch, "
            "a tensor of shape ()"
        )
    return value


def check_weight(weight: Any) -> int:  # noqa: ANN401 - whatever `batch_weight` returned
    """Return the result of `batch_weight` as an int; raise UsageError if it is not one >= 0."""
    if isinstance(weight, numpy.generic) or (isinstance(weight, Tensor) and weight.numel() == 1):
        weight = weight.item()
    if not isinstance(weight, int | float) or weight % 1 or weight < 0:
        raise UsageError(
            f"batch_weight in model.py returned {weight!s:.80}: it must be a whole number, such as "
            "the number of tokens"
        )
    return int(weight)


def check_loaded(datasets: Any) -> Any:  # noqa: ANN401 - data.py's own class
    """Return the result of `load`; raise UsageError if it lacks one of the three datasets."""
    for name in SPLITS:
        if not hasattr(datasets, name):
            raise UsageError(
                f"load in data.py returned {type(datasets).__name__} without '{name}': return "
                "Datasets(train=..., validation=..., test=...)"
            )
    return datasets


def parts_of(dataset: Sets, split: str) -> dict[str, Any]:
    """Return a dataset by its split; for a dictionary of sets, each as `split/name`."""
    if not isinstance(dataset, Mapping):
        return {split: dataset}
    return {f"{split}/{name}": each for name, each in dataset.items()}


def part_of(datasets: Any, name: str, several: bool = False) -> Any:  # noqa: ANN401
    """Return a dataset by its name, such as "test", or "validation/clean" for one of several.

    Args:
        datasets: the result of `load` in data.py.
        name: the split, or one of its parts.
        several: whether a split with parts is returned as a dictionary.

    Raises:
        UsageError: there is no such dataset, or it has several parts.
    """
    found = {split: getattr(datasets, split) for split in SPLITS}
    parts = {k: x for split, each in found.items() for k, x in parts_of(each, split).items()}
    if name not in parts and not (several and name in found):
        raise UsageError(f"there is no dataset '{name}': data.py has {', '.join(parts)}")
    return parts[name] if name in parts else found[name]


def check_data_dir(settings: Settings) -> None:
    """Raise UsageError if the run had its data on the nodes of its job, where they are gone now."""
    if settings.data_dir.startswith("$STAGED"):
        raise UsageError(
            f"data_dir of the run is {settings.data_dir}, a folder that its job had: set --data-dir"
        )


def check_same_settings(settings: Settings, world: World) -> None:
    """Raise UsageError on a rank whose settings differ from those of rank 0."""
    mine = settings.as_dict()
    for name, value in world.broadcast(mine).items():
        if mine[name] != value:
            raise UsageError(
                f"rank {world.rank} has {name} {mine[name]}, but rank 0 has {value}: start all "
                "ranks with the same flags and the same configs/train.yaml"
            )


def check_datasets(
    datasets: Any,  # noqa: ANN401 - data.py's own class
    samples: int | None,
    settings: Settings,
    world: World,
) -> None:
    """Raise UsageError if a dataset is empty, or has different lengths on different ranks.

    Args:
        datasets: the result of `load` in data.py.
        samples: the length of the training set, None if it is unknown.
        settings: without a length, `max_steps` must be set.
        world: the ranks.
    """
    check_length("training", samples, world)
    for name, each in parts_of(datasets.validation, "validation").items():
        check_length(name, len(each), world)
    check_length("test", len(datasets.test), world)
    if samples is None and not settings.max_steps:
        raise UsageError("the training set has no length: set --max-steps")


def check_length(name: str, length: int | None, world: World) -> None:
    """Raise UsageError if a dataset is empty, or has different lengths on different ranks."""
    others = [each for each in world.gather(length) if each != length]
    if others:
        raise UsageError(
            f"the {name} set has {length} samples on rank {world.rank}, but {others[0]} on "
            "another: data.py must return the whole set on every rank; engine/data divides it "
            "among the ranks"
        )
    if length == 0:
        raise UsageError(f"the {name} set has no samples: check data_dir")
