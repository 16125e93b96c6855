"""What is trained, and how: the interface that model.py fills in.

A training is a `Learner`: its networks, their optimizers, the loss of a batch, and the metrics of
an evaluation. Everything else (ranks, batches, checkpoints, trackers) is the same for all.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .engine import checkpoint_files, inference, nested
from .engine.checks import check_loss, check_weight
from .engine.errors import UsageError
from .engine.ranks.device import sum_dtype
from .engine.ranks.strategy import blocks
from .engine.schedule import lr_factor
from .engine.updater import Updater
from .settings import Settings

Networks = Any
"""What `build` returned: a module, or a dictionary of modules by name."""
Batch = Any
"""What the data set and its collate give, with its tensors on this rank's device."""


def model_class() -> "type[Learner]":
    """Return the class of model.py that says what is trained.

    Raises:
        UsageError: there is none, as in projects from before there were learners.
    """
    found = getattr(import_module(".model", __package__), "Model", None)
    if not (isinstance(found, type) and issubclass(found, Learner)):
        raise UsageError(
            "model.py has no 'class Model(Learner)', whose methods say what is trained: "
            "learner.py has the methods, and docs/own-model.md in the repository of the template "
            "says how functions of an earlier model.py become methods"
        )
    return found


class Learner:
    """A kind of training. model.py subclasses it as `Model`, with `build`, `optimizers`, `loss`.

    Attributes:
        best: the metric that decides which checkpoint is the best, and whether less or more of it
            is better. `runs`, sweeps and early stopping go by it too.
        unit: what the weight of a batch counts, such as "tokens"; names the rates in the log.
        settings: those of the run, with the fields of settings.py.
    """

    best: tuple[str, Literal["min", "max"]] = ("validation/loss", "min")
    unit = "samples"

    RENAMED: ClassVar = {
        "weigh": "batch_weight",
        "conclude": "compute_metrics",
        "units": "fsdp_units",
    }

    def __init_subclass__(cls) -> None:
        """Refuse methods of earlier versions, which nothing would call.

        Raises:
            UsageError: the class has one.
        """
        for old, new in cls.RENAMED.items():
            if old in vars(cls):
                raise UsageError(f"the method {old} in model.py is now called {new}: rename it")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    # -- training ---------------------------------------------------------------------------------

    def build(self) -> nn.Module | dict[str, nn.Module]:
        """Return the network to train, or several by name; torch is seeded, alike on all ranks."""
        raise UsageError("Model in model.py has no method 'build': learner.py describes it")

    def optimizers(self, networks: Networks) -> Optimizer | dict[str, Optimizer]:
        """Return the optimizer, or several by name.

        The learning rate of each group of parameters is the one it has here, times `schedule`.
        """
        raise UsageError("Model in model.py has no method 'optimizers': learner.py describes it")

    def loss(self, networks: Networks, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, a scalar.

        A loss with parameters of its own belongs inside a network, where ranks share its gradients.
        """
        raise UsageError("Model in model.py has no method 'loss': learner.py describes it")

    def train_step(self, updater: Updater) -> None:
        """Take a step: one update by the loss, or several updates of different networks."""
        updater.update(self.loss)

    def batch_weight(self, batch: Batch) -> int:
        """Return how much a batch counts in means and rates; the default is its samples.

        Another unit, such as the tokens that the loss is the mean of, is counted here. A batch of
        weight 0 has no part in the loss or the gradient: its loss may be nan.
        """
        return nested.length(batch)

    def schedule(self, progress: float) -> float:
        """Return the factor on all learning rates at a progress from 0 to 1 (settings.schedule)."""
        return lr_factor(self.settings, progress)

    def fsdp_units(self, network: nn.Module) -> Iterable[nn.Module]:
        """Return the parts of a network that FSDP gathers one at a time, the inner ones first."""
        return blocks(network)

    # -- evaluation -------------------------------------------------------------------------------

    def measure(self, networks: Networks, batch: Batch) -> Mapping[str, Any]:
        """Return what a batch of an evaluation adds to the metrics; called without gradients.

        A tensor of any shape is summed over all batches and ranks. A tuple holds the arguments of
        `update` of the object in `metrics` with the same name.
        """
        loss = check_loss(self.loss(networks, batch))
        return {"loss": loss.to(sum_dtype(loss.device)) * self.batch_weight(batch)}

    def metrics(self) -> Mapping[str, Any]:
        """Return objects with `update` and `compute`, such as torchmetrics', for each evaluation.

        For metrics that no sum can give, such as the area under a curve.
        """
        return {}

    def compute_metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, float | Tensor]:
        """Return the metrics by name; the default divides each single number by the weight.

        Args:
            sums: of what `measure` returned, float64 on the CPU; and `weight`, of all batches.
        """
        weight = sums["weight"]
        return {
            name: total / weight
            for name, total in sums.items()
            if name != "weight" and total.numel() == 1
        }

    # -- use --------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        source: str | Path,
        settings: Settings | None = None,
        which: Literal["best", "latest"] = "best",
        device: torch.device | str = "cpu",
    ) -> inference.Trained:
        """Return the trained networks of a run, such as `Model.load("runs/demo/7")`.

        The result has a method `predict`, which takes a batch. If the run kept averages of the
        parameters (`ema`), these are the networks.

        Args:
            source: a run folder, or one of its checkpoints.
            settings: by default, those that the checkpoint was saved with.
            which: the checkpoint of a run folder.
            device: where to put the networks.

        Raises:
            UsageError: there is no checkpoint, or it does not fit model.py.
        """
        path = checkpoint_files.find(Path(source), which)
        settings = settings or inference.saved_settings(Settings, path)
        return inference.load(cls, settings, path, device)

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments of the network's forward: the first part of a pair, or the batch."""
        return (batch[0],) if isinstance(batch, tuple | list) else (batch,)

    def predict(self, networks: Networks, batch: Batch) -> Any:  # noqa: ANN401
        """Return predictions: tensors with a row for each sample, of any nesting."""
        return networks(*self.inputs(batch))

    def describe(self, prediction: Any) -> Any:  # noqa: ANN401
        """Return one sample's prediction as JSON can have it: a line of what `predict` writes.

        The default is all its numbers. Where these are many, such as logits, return less.
        """
        return nested.plain(prediction)


def weight_function(learner: Learner) -> Callable[[Any], int] | None:
    """Return the `batch_weight` of model.py, checked; None if model.py has none of its own."""
    if type(learner).batch_weight is Learner.batch_weight:
        return None
    return lambda batch: check_weight(learner.batch_weight(batch))
