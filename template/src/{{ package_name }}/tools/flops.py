"""The model FLOPs of a training, for the setting `count_flops`: TFLOP/s of a device, and MFU.

Only the FLOPs (floating-point operations) of matrix products and convolutions are counted; a
multiplication and an addition are two FLOPs. Model FLOPs are those that the mathematics of the
model needs. Recomputation to save memory, spare batches and the optimizer do not count. Causal
attention counts as full attention. MFU (model FLOPs utilization) is the rate of model FLOPs as a
share of the device's peak (Chowdhery et al. 2022, PaLM, appendix B: arxiv.org/abs/2204.02311).
"""

import logging
from collections.abc import Callable, Mapping
from functools import cached_property
from inspect import currentframe, getfile
from math import prod
from threading import get_ident
from typing import Any

import torch
from torch.utils import checkpoint
from torch.utils.flop_counter import flop_registry

from ..engine.config import Settings
from ..engine.ranks.device import gpu_properties
from ..engine.ranks.world import World
from ..engine.run.meters import Meter
from ..engine.run.record import RECORDER, Recorder
from ..engine.torch_private import TorchDispatchMode
from ..engine.updater import Updater
from .peaks import fp32_precision, peak

log = logging.getLogger(__name__)

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


class FlopMeter(Meter):
    """A meter that also records train/tflops_per_second and train/mfu_percent, for each device.

    Attributes:
        cost: FLOPs for each unit of weight, as in `FlopCounter.flops`; None before the count.
        means: means of both over the whole run and all devices.
    """

    def __init__(self, unit: str, settings: Settings, world: World) -> None:
        super().__init__(world.device, unit)
        self.unit, self.world, self.bf16 = unit, world, settings.precision == "bf16"
        self.cost: list[float] | None = None
        self.means = Recorder()

    def counted(self, train_step: Callable[[Updater], None]) -> Callable[[Updater], None]:
        """Return a `train_step` that counts the FLOPs of the run's first step."""

        def step(updater: Updater) -> None:
            if self.cost is not None:
                return train_step(updater)
            # Operations inside compiled code can't be seen.
            with torch.compiler.set_stance("force_eager"), FlopCounter() as counter:
                train_step(updater)
            total = self.world.all_reduce(torch.tensor(counter.flops, dtype=torch.float64))
            if weight := updater.weight:
                self.cost = (total / weight).tolist()
                each = f"{sum(self.cost) / 1e9:.4g} for each of {weight} {self.unit}"
                log.info("a step takes %.4g GFLOP: %s", total.sum() / 1e9, each)
            if counter.unknown:
                log.warning(
                    "FLOPs without a formula are not counted: %s", ", ".join(counter.unknown)
                )

        return step

    @cached_property
    def peak(self) -> float | None:
        """The peak TFLOP/s of this device in the precision of most FLOPs, or None if unknown."""
        products, convolutions = self.cost or (0.0, 0.0)
        mostly = fp32_precision(self.device, convolutions > products)
        gpu, precision = gpu_properties(self.device), "bf16" if self.bf16 else mostly
        name, found = getattr(gpu, "name", self.device.type), peak(gpu, precision)
        told = f"{found:.4g} TFLOP/s" if found else "unknown, so there is no MFU"
        log.info("the peak of %s in %s: %s", name, precision, told)
        return found

    def count(self, samples: int, weight: int) -> float:
        """Count a step, as `Meter` does."""
        seconds, size = super().count(samples, weight), self.world.size
        if self.cost:
            tflops = sum(self.cost) * weight / seconds / size / 1e12
            mfu = {"mfu_percent": 100 * tflops / self.peak} if self.peak else {}
            for name, value in {"tflops_per_second": tflops, **mfu}.items():
                RECORDER.add(f"train/{name}", value, seconds)
                self.means.add(name, value, seconds * size)
        return seconds

    def rates(self) -> dict[str, float]:
        """Return the rates over all attempts, with the means of TFLOP/s and MFU."""
        means = {name: float(x) / weight for name, (_, x, weight) in self.means.values.items()}
        return super().rates() | means

    def state_dict(self, world: World) -> dict[str, Any]:
        """Return the state that a resumed run needs. Every rank calls this method."""
        return super().state_dict(world) | {"flops": (self.cost, self.means.state_dict())}

    def load_state_dict(self, state: Mapping[str, Any], world: World) -> None:
        """Continue from the `state_dict` of an earlier attempt, which may have no FLOPs."""
        super().load_state_dict(state, world)
        self.cost, means = state.get("flops", (None, {}))
        self.means.load_state_dict([means], world)
