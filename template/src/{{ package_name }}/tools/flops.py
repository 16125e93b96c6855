"""The model FLOPs of a training, for the setting `count_flops`: TFLOP/s of each device, and MFU.

FLOPs (floating-point operations) are those of matrix products and convolutions, forward and
backward; an addition and a multiplication are two. MFU (model FLOPs utilization) is their rate as a
share of the device's peak, as in appendix B of PaLM (Chowdhery et al. 2022, arXiv:2204.02311).
Model FLOPs are what the mathematics needs. So what is computed again to save memory does not count,
nor do the optimizer and spare batches. As in PaLM, a causal attention counts as a full one.
"""

import logging
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from inspect import getfile
from math import prod
from threading import get_ident
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..engine.config import Settings
from ..engine.ranks.world import World
from ..engine.run.meters import Meter
from ..engine.run.record import RECORDER
from ..engine.updater import Updater
from .peaks import device_name, float32_precision, peak

log = logging.getLogger(__name__)

KINDS = ("products", "convolutions")
OPTIMIZER, CHECKPOINT = getfile(torch.optim.Optimizer), getfile(checkpoint)
BACKWARD = (getfile(torch.autograd.backward), getfile(torch.autograd.graph.Node))


class FlopCounter(TorchDispatchMode):
    """Counts the model FLOPs of this process inside the context, by kind.

    torch's own `FlopCounterMode` counts recomputation too, and no fused attention of CPUs. Formulas
    that were given to `torch.utils.flop_counter.register_flop_formula` are used.
    """

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.thread = Counter[str](), get_ident()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count its FLOPs."""
        if isinstance(func, torch._ops.HigherOrderOperator):
            return NotImplemented
        packet, kwargs = func.overloadpacket, kwargs or {}
        if packet not in flop_registry and torch.is_inference_mode_enabled():
            with self:  # elsewhere, autograd has replaced the operation by its parts
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        name = packet.__name__
        if (flops := _flops(packet, name, args, kwargs, out)) and self._is_of_model():
            self.flops[KINDS["conv" in name]] += flops
        return out

    def _is_of_model(self) -> bool:
        """Return whether what is computed now is computed once, and for the model."""
        if RECORDER.split:  # a spare batch
            return False
        frame = sys._getframe()
        inner = None
        while frame := frame.f_back:
            file = frame.f_code.co_filename
            if inner is None and file == OPTIMIZER:
                return False
            if inner is None and (file == CHECKPOINT or file in BACKWARD):
                inner = file
            # Checkpointed code runs first in a forward pass, then again in a backward pass. GPUs
            # have a thread for that. The reentrant kind starts a backward pass within: it counts.
            if inner == CHECKPOINT and file in BACKWARD:
                return False
        return inner != CHECKPOINT or get_ident() == self.thread


def _flops(packet: Any, name: str, args: tuple, kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of an operation, 0 if there is no formula for it."""
    if name.startswith("_scaled_dot_product"):
        # A fused backward pass computes the scores again: that makes five products for four.
        backward = name.endswith("_backward")
        query, key, value = args[backward : backward + 3]
        products = prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        return 2 * products * (2 if backward else 1)
    formula = flop_registry.get(packet)
    flops = formula(*args, **kwargs, out_val=out) if formula else 0
    return flops * 4 // 5 if name.endswith("attention_backward") else flops


class FlopMeter(Meter):
    """A meter that also records train/tflops_per_second, of a device, and train/mfu_percent.

    Attributes:
        cost: FLOPs of all ranks per unit of weight, by kind; None before the first step.
        totals: by name, a sum over steps and devices, each with its seconds as weight, and these.
    """

    def __init__(self, unit: str, settings: Settings, world: World) -> None:
        super().__init__(world.device, unit)
        self.unit, self.world, self.bf16 = unit, world, settings.precision == "bf16"
        self.cost: dict[str, float] | None = None
        self.totals: dict[str, tuple[float, float]] = {}

    def counted(self, train_step: Callable[[Updater], None]) -> Callable[[Updater], None]:
        """Return a `train_step` that counts FLOPs in the first step of the run."""

        def step(updater: Updater) -> None:
            if self.cost is not None:
                return train_step(updater)
            # What is compiled hides its operations.
            with torch.compiler.set_stance("force_eager"), FlopCounter() as counter:
                train_step(updater)
            mine = torch.tensor([counter.flops[kind] for kind in KINDS], dtype=torch.float64)
            total = self.world.all_reduce(mine).tolist()
            if weight := updater.weight:
                self.cost = {kind: x / weight for kind, x in zip(KINDS, total, strict=True)}
                log.info(
                    "a step takes %.4g TFLOP: %.4g GFLOP for each of %d %s",
                    *(sum(total) / 1e12, sum(total) / weight / 1e9, weight, self.unit),
                )

        return step

    @cached_property
    def peak(self) -> float | None:
        """TFLOP/s of this device at its peak, for the model's mixture of operations."""
        costs = {kind: cost for kind, cost in (self.cost or {}).items() if cost}
        used = {kind: self._precision(kind) for kind in costs}
        peaks = {kind: peak(self.device, used[kind]) or 0.0 for kind in costs}
        how = " and ".join(dict.fromkeys(used.values()))
        if not all(peaks.values()):
            log.info('no MFU: no peak is known for "%s" in %s', device_name(self.device), how)
            return None
        found = sum(costs.values()) / sum(costs[kind] / peaks[kind] for kind in costs)
        log.info("MFU is relative to %.4g TFLOP/s, %s in %s", found, device_name(self.device), how)
        return found

    def _precision(self, kind: str) -> str:
        return "bf16" if self.bf16 else float32_precision(self.device, kind == "convolutions")

    def count(self, samples: int, weight: int) -> float:
        """Count a step; return its seconds."""
        seconds, size = super().count(samples, weight), self.world.size
        if self.cost and any(self.cost.values()):
            tflops = sum(self.cost.values()) * weight / seconds / size / 1e12
            found = {"tflops_per_second": tflops}
            if self.peak:
                found["mfu_percent"] = 100 * tflops / self.peak
            for name, value in found.items():
                RECORDER.add(f"train/{name}", value, seconds)
                before, time = self.totals.get(name, (0.0, 0.0))
                self.totals[name] = (before + value * seconds * size, time + seconds * size)
        return seconds

    def rates(self) -> dict[str, float]:
        """Return the rates of all attempts, with the means of those above."""
        return super().rates() | {name: x / weight for name, (x, weight) in self.totals.items()}

    def state_dict(self, world: World) -> dict[str, Any]:
        """Return what a resumed run must know; every rank calls this."""
        return super().state_dict(world) | {"flops": (self.cost, self.totals)}

    def load_state_dict(self, state: Mapping[str, Any], world: World) -> None:
        """Continue from the `state_dict` of an interrupted run, which may not have counted."""
        super().load_state_dict(state, world)
        cost, totals = state.get("flops", (None, {}))
        self.cost = cost and {kind: float(cost[kind]) for kind in KINDS}
        self.totals = {name: (float(x), float(weight)) for name, (x, weight) in totals.items()}
