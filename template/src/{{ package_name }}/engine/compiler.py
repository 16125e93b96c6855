"""Spares a run the import of PyTorch's compiler, as long as it compiles nothing.

In torch 2.13, DDP and optimizers import torch._dynamo to ask it things whose answers are known if
nothing is compiled. The import takes nearly as long as `import torch`, opens 900 more files, which
a shared disk feels when many ranks start, and takes 70 MiB of each rank.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.optim import SGD

NAME = "torch._dynamo"
PATH: list[str] = []  # of the stand-in


class StandIn(ModuleType):
    """A module with the `known` answers, which imports the real one to answer anything else."""

    def __init__(self, name: str, **known: Any) -> None:  # noqa: ANN401
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(real(self.__name__), name)


class Submodules:
    """Finds the real modules for who imports a part of the compiler from the stand-in.

    Without it, Python would import the whole compiler, and then execute that part a second time.
    """

    @staticmethod
    def find_spec(name: str, path: object = None, _target: object = None) -> ModuleSpec | None:
        """Return a spec if `path` is that of the stand-in."""
        return ModuleSpec(name, Submodules) if path is PATH else None  # type: ignore[arg-type]

    @staticmethod
    def create_module(spec: ModuleSpec) -> ModuleType:
        """Return the real module."""
        return real(spec.name)

    @staticmethod
    def exec_module(_module: ModuleType) -> None:
        """Do nothing: the module was executed when it was imported."""


def real(name: str) -> ModuleType:
    """Import a module of the compiler in place of the stand-in."""
    remove()
    return import_module(name)


def remove() -> None:
    """Let the next import find the real module."""
    if sys.modules.get(NAME) is STAND_IN:
        sys.modules.pop(NAME, None)


def disable(function: Any = None, *options: Any, **named: Any) -> Any:  # noqa: ANN401
    """Return a function as it is to PyTorch itself, which does not want it wrapped."""
    wrapped = named.get("wrapping", True)
    return real(NAME).disable(function, *options, **named) if wrapped else function


STAND_IN = StandIn(
    NAME,
    __path__=PATH,
    disable=disable,
    graph_break=lambda *_, **__: None,
    utils=StandIn(f"{NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
)
sys.meta_path.append(Submodules)


@contextmanager
def spared(user: type) -> Iterator[None]:
    """Answer in place of torch._dynamo inside the context.

    Args:
        user: the class of what runs in the context, such as an optimizer. Only PyTorch's own
            classes are answered.
    """
    own = user.__module__.startswith("torch.")
    if not own or sys.modules.setdefault(NAME, STAND_IN) is not STAND_IN:
        yield
        return
    try:
        yield
    finally:
        remove()


def answer_optimizers() -> None:
    """Let optimizers ask what they ask once in a process, so that it is answered everywhere."""
    with spared(SGD):
        optimizer = SGD([torch.zeros(1)])
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
