"""Reads the search space from configs/sweep.yaml."""

import dataclasses
from pathlib import Path
from typing import Any

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from ...engine.config import as_submitted, read_yaml
from ...engine.errors import UsageError
from ...settings import Settings


def search_space(path: Path) -> dict[str, BaseDistribution]:
    """Return the search space in a file: for each setting, a list of choices, or low and high.

    Raises:
        UsageError: the file can't be read, or a setting or a value in it is wrong.
    """
    wanted = read_yaml(as_submitted(path))
    if not isinstance(wanted, dict) or not wanted:
        raise UsageError(f"{path} names no setting to search: add one, such as lr: [0.05, 0.1]")
    space: dict[str, BaseDistribution] = {}
    for name, spec in wanted.items():
        if name not in [field.name for field in dataclasses.fields(Settings)]:
            raise UsageError(f"{path}: unknown setting '{name}'; see train --help for all")
        try:
            values = spec if isinstance(spec, list) else [spec["low"], spec["high"]]
            # Check each value, and convert it to the setting's type: '1e-3' is text in YAML.
            values = [
                getattr(Settings.from_values({name: value}, f"{path}: "), name) for value in values
            ]
            if isinstance(spec, list):
                space[name] = CategoricalDistribution(values)
            else:
                whole = all(isinstance(value, int) for value in values)
                kind: Any = IntDistribution if whole else FloatDistribution
                if not isinstance(log := spec.get("log", False), bool):
                    raise ValueError(f"log is {log!r}, not true or false")
                space[name] = kind(*values, log=log)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path}: {name} is {spec!r} ({error}): give a list of choices, or low, high and "
                "perhaps log"
            ) from None
    return space
