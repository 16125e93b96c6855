"""Going on with an optimizer, whose options may have changed since the checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from .errors import UsageError


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group of parameters, such as weight decay."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], path: Path) -> None:
    """Load an optimizer's state, but leave it the options that it was now made with.

    Args:
        optimizer: as model.py made it.
        state: of the checkpoint, which has the optimizer's class and `options_of` it, as it was
            made then: what an optimizer changes by itself among its options stays as it is there.
        path: of the checkpoint.

    Raises:
        UsageError: it is of another class.
        ValueError: it has other groups of parameters.
    """
    now = options_of(optimizer)
    mine = type(optimizer).__name__
    if (theirs := state.get("optimizer_class", mine)) != mine:
        raise UsageError(
            f"{path} was saved with {theirs}, but model.py makes the optimizer {mine}: choose "
            f"another --run-dir, or bring back {theirs}"
        )
    optimizer.load_state_dict(state["optimizer"])
    for group, made, earlier in zip(
        optimizer.param_groups, now, state.get("options", now), strict=True
    ):
        group.update({name: made[name] for name in made if made[name] != earlier.get(name)})
