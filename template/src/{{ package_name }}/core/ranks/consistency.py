"""Checks that all ranks were started alike: with the same settings, and the same data."""

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


def refuse_different_samples(name: str, samples: int | None, world: World) -> None:
    """Make sure that a set has samples, and as many on all ranks; None: nobody knows.

    Raises:
        UsageError: on every rank, if it has not.
    """
    most, fewest = world.maximum([samples or 0, -(samples or 0)])
    if most != -fewest:
        raise UsageError(
            f"the {name} set has {samples} samples on rank {world.rank}, and from {-fewest:.0f} "
            f"to {most:.0f} on all: data.py must return the same on each, and "
            "core/loading shares it out"
        )
    if samples == 0:
        raise UsageError(f"the {name} set has no samples: is data_dir the right folder?")
