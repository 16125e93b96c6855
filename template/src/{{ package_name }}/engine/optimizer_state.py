"""Going on with an optimizer, whose options may have changed since the checkpoint."""

from typing import Any

from torch.optim import Optimizer


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each group of parameters, such as weight decay."""
    return [
        {name: value for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def load_optimizer(
    optimizer: Optimizer, state: dict[str, Any], options: list[dict[str, Any]], kind: str
) -> None:
    """Load an optimizer's state, but leave it the options that it was now made with.

    Args:
        optimizer: as model.py made it.
        state: of the checkpoint.
        options: `options_of` the optimizer of the checkpoint, as it was made then: what an
            optimizer changes by itself among its options stays as it is in the state.
        kind: name of its class.

    Raises:
        ValueError: it is of another class, or has other groups of parameters.
    """
    now = options_of(optimizer)
    mine = type(optimizer).__name__
    if kind != mine:
        raise ValueError(f"it was saved with {kind}, but model.py makes the optimizer {mine}")
    optimizer.load_state_dict(state)
    for group, made, earlier in zip(optimizer.param_groups, now, options, strict=True):
        group.update({name: made[name] for name in made if made[name] != earlier.get(name)})
