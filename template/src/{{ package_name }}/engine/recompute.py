"""The setting `recompute`: activation checkpointing.

The backward pass computes activations again, so that they need not be kept in memory.
Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost (arxiv.org/abs/1604.06174).
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .run.record import RECORDER

log = logging.getLogger(__name__)


def recompute(network: nn.Module, units: Iterable[nn.Module]) -> None:
    """Let parts of a network keep only their inputs for the backward pass.

    The names of modules, the parameters and the results do not change.

    Args:
        network: not yet distributed, so that FSDP gathers a part for both of its forward passes.
        units: the parts. If a part contains other parts, only those are recomputed.
    """
    chosen = set(units)
    parts = [unit for unit in chosen if chosen.isdisjoint([*unit.modules()][1:])]
    for part in parts:
        part.forward = partial(_forward, part, part.forward)  # type: ignore[method-assign]
    log.info("recompute: %d modules of %s", len(parts), type(network).__name__)


def _forward(part: nn.Module, forward: Any, *arguments: Any, **named: Any) -> Any:  # noqa: ANN401
    first: list[list[tuple[nn.Module, str, Tensor]]] = []

    def run(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - the part's own
        if torch.compiler.is_compiling():  # a compiled graph updates buffers only once
            return forward(*arguments, **named)
        if first:
            with _as_before(first[0]), RECORDER.apart():
                return forward(*arguments, **named)
        modules = part.modules()
        buffers = (
            (x, name, each) for x in modules for name, each in x.named_buffers(recurse=False)
        )
        first.append([(module, name, each.clone()) for module, name, each in buffers])
        return forward(*arguments, **named)

    if not torch.is_grad_enabled():
        return forward(*arguments, **named)
    return checkpoint(run, *arguments, use_reentrant=False, **named)


@contextmanager
def _as_before(buffers: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Replace buffers, such as running statistics, by earlier values inside the context."""
    now = [(module, name, getattr(module, name)) for module, name, _ in buffers]
    for module, name, value in buffers:
        setattr(module, name, value.clone())  # `value` must not change: another pass may need it
    try:
        yield
    finally:
        for module, name, value in now:
            setattr(module, name, value)
