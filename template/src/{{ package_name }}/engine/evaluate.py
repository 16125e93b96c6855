"""Evaluation: metrics over a whole dataset, exact on any number of ranks."""

import logging
import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .checks import check_weight
from .config import Settings
from .data.batches import evaluation_batches
from .data.seeds import derive, seed_generators
from .errors import UsageError
from .nested import to_cpu, to_device
from .networks import Networks
from .ranks.device import autocast
from .ranks.world import World
from .run.record import RECORDER
from .sums import Sums

log = logging.getLogger(__name__)


class Evaluated(Protocol):
    """The part of a learner that an evaluation uses; `Learner` in learner.py describes it."""

    best: tuple[str, Any]

    def batch_weight(self, batch: Any) -> int: ...  # noqa: ANN401 - what data.py makes
    def measure(self, networks: Any, batch: Any) -> Mapping[str, Any]: ...  # noqa: ANN401
    def metrics(self) -> Mapping[str, Any]: ...
    def compute_metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, float | Tensor]: ...
    def inputs(self, batch: Any) -> tuple[Any, ...]: ...  # noqa: ANN401
    def predict(self, networks: Any, batch: Any) -> Any: ...  # noqa: ANN401


@dataclass
class Evaluation:
    """The result of an evaluation.

    Attributes:
        metrics: by name, such as validation/loss.
        sums: of what `measure` returned, by name, over all batches and ranks.
    """

    metrics: dict[str, float]
    sums: dict[str, Tensor] = field(default_factory=dict)


class Evaluator:
    """Evaluates the networks of a learner.

    Args:
        learner: measures batches and computes metrics.
        networks: to evaluate; if they have averages, the averages are evaluated.
        settings: of the run. world: the ranks.
    """

    def __init__(
        self, learner: Evaluated, networks: Networks, settings: Settings, world: World
    ) -> None:
        self.learner, self.networks = learner, networks
        self.settings, self.world = settings, world
        self.warned: set[str] = set()

    def check(self, dataset: Dataset) -> None:
        """Evaluate and predict one sample on each rank, to find mistakes before the first step.

        Raises:
            UsageError: `best` is not a metric of the validation with "min" or "max".
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some metrics warn about too few samples
            try:
                found = self._evaluate(dataset, "validation", 0, self.world.size).metrics
                self.predict(dataset, 1)
            except Exception as error:
                error.add_note(
                    "this failed in an evaluation of one sample on each rank, before the first "
                    "step: measure, metrics and predict must work for one sample"
                )
                raise
        if self.learner.best not in [(name, each) for name in found for each in ("min", "max")]:
            raise UsageError(
                f"best in model.py is {self.learner.best!r}: it must be a metric of the validation "
                f'and "min" or "max", and the metrics are {", ".join(found)}'
            )

    def evaluate(self, dataset: Dataset, split: str, step: int) -> Evaluation:
        """Return the metrics over a map-style dataset; every rank calls this.

        Args:
            dataset: each of its samples counts once, on one rank.
            split: "validation" or "test".
            step: steps taken so far; it seeds the random numbers of the evaluation.

        Raises:
            UsageError: `measure` or `compute_metrics` returned a value of a wrong type.
        """
        found = self._evaluate(dataset, split, step, None)
        for name, value in list(found.metrics.items()):
            if not math.isfinite(value) and name != self.learner.best[0]:
                if name not in self.warned:
                    log.warning("%s is %s at step %d; it is not recorded", name, value, step)
                self.warned.add(name)
                del found.metrics[name]
        return found

    @torch.no_grad()
    def predict(self, dataset: Dataset, samples: int) -> tuple[Any, Any]:
        """Return a batch of this rank's first samples, and its predictions, on the CPU.

        Every rank calls this: with FSDP, the ranks gather the parameters together.
        """
        batch, _ = next(self._batches(dataset, samples * self.world.size))
        batch = to_device(batch, self.world.device)
        self.learner.inputs(batch)  # `export` calls it; a mistake in it should show early
        modules = self.networks.evaluated
        with (
            evaluation_mode(modules, self.world),
            RECORDER.paused(),
            autocast(self.world.device, self.settings.precision),
        ):
            return to_cpu((batch, self.learner.predict(self.networks.view(modules), batch)))

    @torch.no_grad()
    def _evaluate(self, dataset: Dataset, split: str, step: int, samples: int | None) -> Evaluation:
        modules, device = self.networks.evaluated, self.world.device
        networks = self.networks.view(modules)
        objects = {
            name: each.to(device) if hasattr(each, "to") else each
            for name, each in self.learner.metrics().items()
        }
        seed_generators(derive("evaluation", self.settings.seed, self.world.rank, step))
        sums = Sums()
        with evaluation_mode(modules, self.world), RECORDER.evaluating(split):
            for batch, counts in self._batches(dataset, samples):
                weight = check_weight(self.learner.batch_weight(batch))
                batch = to_device(batch, device)
                with (
                    autocast(device, self.settings.precision),
                    nullcontext() if counts else RECORDER.paused(),
                ):
                    measured = self.learner.measure(networks, batch)
                if counts:
                    sums.add(measured, weight, objects)
            recorded, _ = RECORDER.read(self.world)
        totals = sums.over_all_ranks(self.world)
        metrics = {f"{split}/{k}": v for k, v in self._metrics(totals, objects).items()}
        if twice := metrics.keys() & recorded.keys():
            raise UsageError(f"{min(twice)} is both measured and recorded: rename one of the two")
        return Evaluation(metrics | recorded, totals)

    def _metrics(self, sums: dict[str, Tensor], objects: Mapping[str, Any]) -> dict[str, float]:
        found = self.learner.compute_metrics(sums)
        if not isinstance(found, Mapping):
            raise UsageError(
                f"compute_metrics in model.py returned {found!s:.80}: return a dictionary of "
                "numbers"
            )
        values = dict(found)
        for name, each in objects.items():
            value = each.compute()
            several = isinstance(value, Mapping)
            values |= {f"{name}/{k}": v for k, v in value.items()} if several else {name: value}
        try:
            return {name: float(value) for name, value in values.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"compute_metrics in model.py returned a metric that is not a number ({error}): "
                "return a single number for each metric"
            ) from None

    def _batches(self, dataset: Dataset, samples: int | None) -> Iterator[tuple[Any, bool]]:
        """Yield this rank's batches, each with whether it counts.

        With FSDP, all ranks must call the networks equally often. So a rank with one batch fewer
        than rank 0 gets another one at the end, which does not count.

        Args:
            dataset: map-style.
            samples: how many to read on all ranks together, without workers; None for all.
        """
        settings, size = self.settings, self.settings.test_batch_size
        length = len(dataset)  # type: ignore[arg-type]
        workers = settings.workers if samples is None else 0
        total = length if samples is None else min(samples, length)
        mine, most = (range(rank, total, self.world.size) for rank in (self.world.rank, 0))
        for batch in evaluation_batches(dataset, mine, size, workers):
            yield batch, True
        if math.ceil(len(mine) / size) < math.ceil(len(most) / size):
            yield next(evaluation_batches(dataset, [0], 1, 0)), False


@contextmanager
def evaluation_mode(modules: Mapping[str, nn.Module], world: World) -> Iterator[None]:
    """Put networks into evaluation mode, with the buffers of rank 0, as in checkpoints."""
    networks = modules.values()
    modes = [(each, each.training) for network in networks for each in network.modules()]
    for network in networks:
        if world.size > 1:
            for buffer in network.buffers():
                torch.distributed.broadcast(buffer, src=0)
        network.eval()
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode
        for network in networks:
            # FSDP keeps the outermost parameters gathered, for a backward pass.
            reshard: Any = getattr(network, "reshard", None)
            if reshard:
                reshard()
