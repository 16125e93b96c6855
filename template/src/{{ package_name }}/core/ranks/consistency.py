"""Checks that all ranks were started alike: with the same settings, and the same data."""

from typing import Any

from ..config import Settings
from ..errors import UsageError
from .world import World


def refuse_different_settings(settings: Settings, world: World) -> None:
    """Make sure that all ranks were started with the same settings.

    Raises:
        UsageError: on a rank whose settings are not rank 0's.
    """
    mine = settings.as_dict()
    for name, value in world.broadcast(mine).items():
        if mine[name] != value:
            raise UsageError(
                f"rank {world.rank} has {name} {mine[name]}, but rank 0 has {value}: start all "
                "ranks with the same flags and the same configs/train.yaml"
            )


def refuse_unusable_sets(
    datasets: Any,  # noqa: ANN401 - data.py's own class
    samples: int | None,
    settings: Settings,
    world: World,
) -> None:
    """Make sure that each set has samples, and as many on all ranks.

    Args:
        datasets: with `validation` and `test`, whose lengths are known.
        samples: of the training set, None where nobody knows.
        settings, world: as everywhere.

    Raises:
        UsageError: on every rank, if one has not; or if it is not known when an epoch, and so the
            training, ends.
    """
    _refuse_different_samples("training", samples, world)
    _refuse_different_samples("validation", len(datasets.validation), world)
    _refuse_different_samples("test", len(datasets.test), world)
    if not samples and not settings.max_steps:
        raise UsageError("the training set does not say its length: set --max-steps")


def _refuse_different_samples(name: str, samples: int | None, world: World) -> None:
    most, fewest = world.maximum([samples or 0, -(samples or 0)])
    if most != -fewest:
        raise UsageError(
            f"the {name} set has {samples} samples on rank {world.rank}, and from {-fewest:.0f} "
            f"to {most:.0f} on all: data.py must return the same on each, and "
            "core/loading shares it out"
        )
    if samples == 0:
        raise UsageError(f"the {name} set has no samples: is data_dir the right folder?")
