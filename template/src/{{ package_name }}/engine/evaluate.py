"""Computes metrics over a whole dataset, exactly and on any number of ranks."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .checks import Sets, check_weight, parts_of
from .config import Settings
from .data.batches import evaluation_batches
from .data.seeds import derive, seed_generators
from .errors import UsageError
from .inference import Trained
from .nested import to_cpu, to_device
from .networks import Networks
from .ranks.device import autocast, sum_dtype
from .ranks.world import World
from .run.record import RECORDER

log = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """The metrics by name, such as validation/loss, and the sums over all ranks by name.

    The sums are float64 tensors on the CPU.
    """

    metrics: dict[str, float]
    sums: dict[str, Tensor]


@dataclass
class Evaluator:
    """Evaluates the networks of a learner, or their moving averages if there are any.

    Attributes:
        learner: a `Learner` of learner.py. This module must not import that class.
        networks: the networks of a training, or those of a checkpoint.
        shapes: of the tensors that `measure` returned, by split and name.
    """

    learner: Any
    networks: Networks | Trained
    settings: Settings
    world: World
    shapes: dict[tuple[str, str], torch.Size] = field(default_factory=dict)

    def check(self, validation: Sets, test: Dataset) -> tuple[Evaluation, tuple[Any, Any]]:
        """Evaluate and predict one sample on each rank, to find mistakes before the first step.

        Returns:
            The evaluation of up to 16 test samples on each rank; this rank's, and their
            predictions.

        Raises:
            UsageError: `best` of the learner is not the name of a validation metric with "min" or
                "max".
        """
        found: dict[str, float] = {}
        for name, each in parts_of(validation, "validation").items():
            found |= self._evaluate(each, name, 0, self.world.size).metrics
            self.predict(each, 1)
        if self.learner.best not in [(name, each) for name in found for each in ("min", "max")]:
            raise UsageError(
                f"best in model.py is {self.learner.best!r}: it must be a metric of the validation "
                f'and "min" or "max", and the metrics are {", ".join(found)}'
            )
        few = min(16, self.settings.test_batch_size)
        return self._evaluate(test, "test", 0, few * self.world.size), self.predict(test, few)

    def evaluate(self, dataset: Sets, split: str, step: int) -> Evaluation:
        """Return the metrics over a map-style dataset, or a dictionary of them.

        Every rank calls this.

        Args:
            dataset: each of its samples is evaluated once, on one rank.
            split: "validation", "test" or "train"; the names of the metrics begin with it.
            step: steps taken so far; it seeds the random numbers of the evaluation.
        """
        found = Evaluation({}, {})
        for name, each in parts_of(dataset, split).items():
            one, prefix = self._evaluate(each, name, step, None), name[len(split) + 1 :]
            found.metrics.update(one.metrics)
            found.sums.update({f"{prefix}/{k}" if prefix else k: s for k, s in one.sums.items()})
        for name, value in list(found.metrics.items()):
            if not math.isfinite(value) and name != self.learner.best[0]:
                log.warning("%s is %s at step %d; it is not recorded", name, value, step)
                del found.metrics[name]
        return found

    def predict(self, dataset: Dataset, samples: int) -> tuple[Any, Any]:
        """Return a batch of this rank's first samples and its predictions, on the CPU.

        Every rank calls this, since FSDP gathers the parameters from all ranks.
        """
        batch = next(self._batches(dataset, samples * self.world.size))[0]
        batch = to_device(batch, self.world.device)
        self.learner.inputs(batch)  # only `export` needs it, but a mistake in it should show early
        with self.mode() as networks:
            return to_cpu((batch, self.learner.predict(networks, batch)))

    @contextmanager
    def mode(self) -> Iterator[Any]:
        """Return a context with the evaluated networks in evaluation mode, without gradients.

        Numbers that are recorded in it are dropped.
        """
        with self._evaluating() as networks, autocast(self.world.device, self.settings.precision):
            yield networks

    @contextmanager
    def _evaluating(self, split: str = "unused") -> Iterator[Any]:
        """Return the context of `mode` without autocast; what is recorded belongs to a split.

        The buffers are those of rank 0, as in checkpoints. At the end, the previous mode of each
        module is restored.
        """
        networks = self.networks.evaluated.values()
        modes = [(each, each.training) for network in networks for each in network.modules()]
        for network in networks:
            if self.world.size > 1:
                for buffer in network.buffers():
                    torch.distributed.broadcast(buffer, src=0)
            network.eval()
        try:
            with torch.no_grad(), RECORDER.apart(split):
                yield self.networks.view(self.networks.evaluated)
        finally:
            for each, mode in modes:
                each.training = mode
            for network in networks:
                # After a forward pass, FSDP keeps the outermost parameters gathered for the
                # backward pass. Here, no backward pass follows.
                if reshard := getattr(network, "reshard", None):
                    reshard()

    @torch.no_grad()
    def _evaluate(self, dataset: Dataset, split: str, step: int, samples: int | None) -> Evaluation:
        device = self.world.device
        objects = {
            name: each.to(device) if hasattr(each, "to") else each
            for name, each in self.learner.metrics().items()
        }
        seed_generators(derive("evaluation", self.settings.seed, self.world.rank, step))
        sums = {"weight": torch.zeros((), dtype=torch.float64)}
        with self._evaluating(split) as networks:
            for batch, counts in self._batches(dataset, samples):
                weight = check_weight(self.learner.batch_weight(batch)) if counts else None
                batch = to_device(batch, device)
                with (
                    autocast(device, self.settings.precision),
                    nullcontext() if counts else RECORDER.apart(),
                ):
                    self._add(sums, objects, self.learner.measure(networks, batch), weight, split)
            recorded = RECORDER.read(self.world)
        totals = over_all_ranks(sums, self.world)
        metrics = {f"{split}/{k}": v for k, v in self._metrics(totals, objects).items()}
        if twice := metrics.keys() & recorded.keys():
            raise UsageError(f"{min(twice)} is both measured and recorded: rename one of the two")
        return Evaluation(metrics | recorded, totals)

    def _add(
        self,
        sums: dict[str, Tensor],
        objects: Mapping[str, Any],
        measured: object,
        weight: int | None,
        split: str,
    ) -> None:
        """Add the result of the learner's `measure` for a batch.

        The shape of a tensor must not change, since a sum of different shapes may broadcast to a
        wrong result.

        Args:
            sums: the sums so far by name, and their `weight`.
            objects: the objects that the learner's `metrics` returned, by name.
            measured: by name, tensors that are added to the sums, and tuples that are passed as
                arguments to `update` of an object.
            weight: the weight of the batch; None if the batch does not count, so that only zeros
                are added.
            split: what is evaluated.

        Raises:
            UsageError: `measured` has values of other types, or of other shapes than earlier
                batches of this split.
        """
        if not isinstance(measured, Mapping):
            raise UsageError(
                f"measure in model.py returned {measured!s:.80}: return a dictionary of tensors"
            )
        sums["weight"] += weight or 0
        for name, value in measured.items():
            if isinstance(value, tuple) and name in objects:
                if weight is not None:
                    objects[name].update(*value)
            elif isinstance(value, Tensor) and name != "weight":
                shape = self.shapes.setdefault((split, name), value.shape)
                if value.shape != shape:
                    raise UsageError(
                        f"measure in model.py returned '{name}' of shape {tuple(shape)} for one "
                        f"batch and {tuple(value.shape)} for another: return the sum over the batch"
                    )
                value = value.detach().to(sum_dtype(value.device))
                if weight is None:
                    value = torch.zeros_like(value)
                elif not weight:
                    # The mean loss of a batch may be nan if all of its labels are ignored.
                    value = value.masked_fill(value.isnan(), 0)
                sums[name] = value + sums.get(name, 0)
            else:
                raise UsageError(
                    f"measure in model.py returned '{name}' as {type(value).__name__}: return a "
                    "tensor to be summed, or a tuple for the object of this name in metrics"
                )

    def _metrics(self, sums: dict[str, Tensor], objects: Mapping[str, Any]) -> dict[str, float]:
        found = self.learner.compute_metrics(sums)
        computed = {name: each.compute() for name, each in objects.items()}
        try:
            values = dict(found)
            for name, value in computed.items():
                several = isinstance(value, Mapping)
                values |= {f"{name}/{k}": v for k, v in value.items()} if several else {name: value}
            return {name: float(value) for name, value in values.items()}
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"compute_metrics in model.py returned {found!s:.80} ({error}): return a "
                "dictionary with a single number for each metric"
            ) from None

    def _batches(self, dataset: Dataset, samples: int | None) -> Iterator[tuple[Any, bool]]:
        """Yield this rank's batches, each with whether it counts.

        With FSDP, all ranks must call the networks equally often. So if a rank has one batch fewer
        than rank 0, it gets an extra batch at the end, which does not count.

        Args:
            dataset: map-style.
            samples: how many samples all ranks together read, without loading workers; None for
                the whole dataset.
        """
        size, total = self.settings.test_batch_size, len(dataset)  # type: ignore[arg-type]
        workers = self.settings.workers if samples is None else 0
        total = min(samples or total, total)
        mine, most = (range(rank, total, self.world.size) for rank in (self.world.rank, 0))
        for batch in evaluation_batches(dataset, mine, size, workers):
            yield batch, True
        if math.ceil(len(mine) / size) < math.ceil(len(most) / size):
            yield next(evaluation_batches(dataset, [0], 1, 0)), False


def over_all_ranks(sums: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return sums over all ranks, as float64 tensors on the CPU.

    Raises:
        UsageError: on every rank, if the names or the shapes differ between ranks.
    """
    shapes, *others = world.gather({name: tuple(total.shape) for name, total in sums.items()})
    for other in others:
        if other != shapes:
            raise UsageError(
                f"measure in model.py returned {shapes} on one rank and {other} on another: "
                "return the same names and shapes for every batch"
            )
    return {name: world.all_reduce(sums[name].cpu().double()) for name in shapes}
