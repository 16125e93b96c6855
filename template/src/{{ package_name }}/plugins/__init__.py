"""What a training does besides training: modules that the engine does not name.

A plug-in is a module with a class `Plugin`. It is made from the `Training`, before the networks are
built. Its methods have the names of the hooks in learner.py, and are called before those of the
model. A module may also have a dataclass `Settings`: its fields become settings of the run. It is
imported with the settings, so it imports torch only where it needs it.

A project has the plug-ins that its answers chose. Without a plug-in, a training gives the same
parameters.
"""

import pkgutil
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .. import engine

if TYPE_CHECKING:
    from ..engine import Settings as Settings
    from ..engine import Training


def modules() -> list[ModuleType]:
    """Return the plug-ins of this project."""
    names = sorted(each.name for each in pkgutil.iter_modules(__path__))
    return [import_module(f".{name}", __package__) for name in names]


def load(training: "Training") -> list[Any]:
    """Return the objects whose methods are called at the events of a training."""
    return [module.Plugin(training) for module in modules()]


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Return `Settings`: those of the engine, and those of all plug-ins."""
    if name != "Settings":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    own = [module.Settings for module in modules() if hasattr(module, "Settings")]
    made = dataclass(frozen=True, kw_only=True)(type(name, (*own, engine.Settings), {}))
    globals()[name] = made
    return made
