"""Spares a run the import of PyTorch's compiler, as long as it compiles nothing.

In torch 2.13, DDP and optimizers import torch._dynamo to ask it things whose answers are known if
nothing is compiled. The import takes nearly as long as `import torch`, opens 900 more files, which
a shared disk feels when many ranks start, and takes 70 MiB of each rank.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch.optim import SGD

NAME = "torch._dynamo"


class _StandIn(ModuleType):
    """A module with the `known` answers, which imports the real one to answer anything else."""

    def __init__(self, name: str, **known: Any) -> None:  # noqa: ANN401
        super().__init__(name)
        vars(self).update(known)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        _remove()
        return getattr(import_module(self.__name__), name)


STAND_IN = _StandIn(
    NAME,
    disable=lambda function, *_, **__: function,
    graph_break=lambda: None,
    utils=_StandIn(f"{NAME}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer"),
)


@contextmanager
def spared(user: type) -> Iterator[None]:
    """Answer in place of torch._dynamo inside the context.

    The stand-in has no submodules, so it answers only PyTorch's own code.

    Args:
        user: the class of what runs in the context, such as an optimizer.
    """
    if NAME in sys.modules or not user.__module__.startswith("torch."):
        yield
        return
    sys.modules[NAME] = STAND_IN
    try:
        yield
    finally:
        _remove()


def _remove() -> None:
    if sys.modules.get(NAME) is STAND_IN:
        del sys.modules[NAME]


def answer_optimizers() -> None:
    """Let optimizers ask what they ask once in a process, so that it is answered everywhere."""
    with spared(SGD):
        optimizer = SGD([torch.zeros(1)])
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
