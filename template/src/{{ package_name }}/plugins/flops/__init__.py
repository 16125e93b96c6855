"""Logs the TFLOP/s of a device and its MFU: `train --count-flops`.

MFU (model FLOPs utilization) is the rate of model FLOPs (counter.py) as a share of the device's
peak (Chowdhery et al. 2022, PaLM, appendix B: arxiv.org/abs/2204.02311).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...engine import Training, Updater

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of this plug-in."""

    count_flops: bool = False
    """count the floating-point operations of the first step, and log TFLOP/s and MFU;
    with COMPILE, the first step runs without torch.compile"""


class Plugin:
    """Records train/tflops_per_second and train/mfu_percent, for each device.

    Attributes:
        cost: FLOPs for each unit of weight, as in `FlopCounter.flops`; None before the count.
        means: means of both over the whole run and all devices.
    """

    def __init__(self, training: "Training") -> None:
        self.training, self.counts = training, training.settings.count_flops
        self.cost: list[float] | None = None

    def on_start(self, training: "Training") -> None:
        """Continue from the state of an earlier attempt; otherwise count the first step."""
        if self.counts:
            from ...engine.run.record import Recorder

            self.means = Recorder()
            self.cost, means = training.checkpointing.plugins.get("flops", (None, {}))
            self.means.load_state_dict([means], training.world)
            self._show_means()
            training.learner.train_step = self._counted(training.learner.train_step)

    def _counted(self, train_step: "Callable[[Updater], None]") -> "Callable[[Updater], None]":
        """Return a `train_step` that counts the FLOPs of the run's first step."""
        import torch

        from .counter import FlopCounter

        def step(updater: "Updater") -> None:
            if self.cost is not None:
                return train_step(updater)
            # Operations inside compiled code can't be seen.
            with torch.compiler.set_stance("force_eager"), FlopCounter() as counter:
                train_step(updater)
            flops = torch.tensor(counter.flops, dtype=torch.float64)
            total = self.training.world.all_reduce(flops)
            if weight := updater.weight:
                self.cost = (total / weight).tolist()
                each = f"{sum(self.cost) / 1e9:.4g} for each of {weight}"
                unit = self.training.learner.unit
                log.info("a step takes %.4g GFLOP: %s %s", total.sum() / 1e9, each, unit)
            if counter.unknown:
                log.warning(
                    "FLOPs without a formula are not counted: %s", ", ".join(counter.unknown)
                )

        return step

    @cached_property
    def peak(self) -> float | None:
        """The peak TFLOP/s of this device in the precision of most FLOPs, or None if unknown."""
        from ...engine.ranks.device import gpu_properties
        from .peaks import fp32_precision, peak

        device, chosen = self.training.world.device, self.training.settings.precision
        products, convolutions = self.cost or (0.0, 0.0)
        mostly = fp32_precision(device, convolutions > products)
        gpu, precision = gpu_properties(device), mostly if chosen == "fp32" else chosen
        name, found = getattr(gpu, "name", device.type), peak(gpu, precision)
        told = f"{found:.4g} TFLOP/s" if found else "unknown, so there is no MFU"
        log.info("the peak of %s in %s: %s", name, precision, told)
        return found

    def on_step(self, training: "Training") -> None:
        """Record the rates of a step."""
        from ...engine.run.record import RECORDER

        if self.cost:
            meter, size = training.meter, training.world.size
            tflops = sum(self.cost) * meter.weight / meter.seconds / size / 1e12
            mfu = {"mfu_percent": 100 * tflops / self.peak} if self.peak else {}
            for name, value in {"tflops_per_second": tflops, **mfu}.items():
                RECORDER.add(f"train/{name}", value, meter.seconds)
                self.means.add(name, value, meter.seconds * size)
            self._show_means()

    def _show_means(self) -> None:
        """Let the summary and the log have the means among the rates of the run."""
        for name, (_, value, weight) in self.means.values.items():
            self.training.meter.others[name] = float(value) / weight

    def on_save(self, training: "Training") -> None:
        """Put the count and the means into the checkpoint."""
        if self.counts:
            training.checkpointing.plugins["flops"] = self.cost, self.means.state_dict()
