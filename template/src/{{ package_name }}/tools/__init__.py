"""The commands other than `train` and `download`, and torchrun.py, which starts the ranks.

A project can be made without any of the commands but `runs`.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def program(command: str) -> str:
    """Return the words that run a command, for its `--help`: `python -m <package> COMMAND`."""
    return f"python -m {__package__.partition('.')[0]} {command}"


def optional(module: str) -> ModuleType | None:
    """Return a module of this project, such as `plugins.usage.costs`, or None if it has none."""
    try:
        found = find_spec(f"..{module}", __package__)
    except ModuleNotFoundError:  # the package around it does not exist
        return None
    return import_module(found.name) if found else None
