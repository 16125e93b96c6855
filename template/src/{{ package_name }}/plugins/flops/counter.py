"""Counts model FLOPs.

Only the FLOPs (floating-point operations) of matrix products and convolutions are counted; a
multiplication and an addition are two FLOPs. Model FLOPs are those that the mathematics of the
model needs. Recomputation to save memory, spare batches and the optimizer do not count. Causal
attention counts as full attention.
"""

from inspect import currentframe, getfile
from math import prod
from threading import get_ident
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ...engine.run.record import RECORDER

NAMESPACES = ("aten", "prim", "profiler", "c10d", "fsdp")  # of PyTorch's own operations
OPTIMIZER, CHECKPOINT = getfile(torch.optim.Optimizer), getfile(checkpoint)
BACKWARD = (getfile(torch.autograd.backward), getfile(torch.autograd.graph.Node))


class FlopCounter(TorchDispatchMode):
    """Counts the model FLOPs of this process inside the context.

    PyTorch's `FlopCounterMode` counts recomputation too, and does not count the fused attention of
    CPUs. Both use the formulas of `torch.utils.flop_counter.register_flop_formula`.

    Attributes:
        flops: the FLOPs of matrix products, and of convolutions.
        unknown: names of operations without a formula, which may have FLOPs.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.unknown, self.thread = [0, 0], set[str](), get_ident()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        """Run an operation, and count its FLOPs."""
        packet = getattr(func, "overloadpacket", func)  # higher-order operators have none
        out, name, flops = func(*args, **(kwargs or {})), packet.__name__, 0
        if name.startswith("_scaled_dot_product"):
            # The backward pass needs four products. A fused one computes the scores again, a fifth.
            backward = name.endswith("_backward")
            query, key, value = args[backward : backward + 3]
            pairs = prod(query.shape[:-1]) * key.shape[-2]
            flops = 2 * pairs * (query.shape[-1] + value.shape[-1]) * (2 if backward else 1)
        elif formula := flop_registry.get(packet):
            flops = formula(*args, **(kwargs or {}), out_val=out)
        elif "rnn" in name or func.namespace not in NAMESPACES:
            self.unknown.add(str(packet))
        if flops and not RECORDER.split and self._is_of_model():  # split: a spare batch
            self.flops["conv" in name] += flops
        return out

    def _is_of_model(self) -> bool:
        """Return whether the current operation is one of the model, and not a recomputation."""
        # Code in `checkpoint()` runs in the forward pass, and again in the backward pass, which has
        # its own thread on GPUs. With use_reentrant=True, it then starts a backward pass inside the
        # first one. That one counts.
        frame, again = currentframe(), False
        while frame := frame and frame.f_back:
            file = frame.f_code.co_filename
            if file in BACKWARD:
                return not again
            if file == OPTIMIZER:
                return False
            again = again or file == CHECKPOINT
        return not again or get_ident() == self.thread
