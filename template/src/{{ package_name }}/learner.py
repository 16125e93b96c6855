"""The interface that `Model` in model.py implements.

A `Learner` has the networks, their optimizers, the loss of a batch, and the metrics of an
evaluation. Everything else (ranks, batches, checkpoints, trackers) is the same for all models.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .engine import checkpoint_files, inference, nested
from .engine.checks import check_loss
from .engine.errors import UsageError
from .engine.hooks import Training
from .engine.ranks.device import sum_dtype
from .engine.ranks.strategy import blocks
from .engine.schedule import lr_factor
from .engine.updater import Updater
from .settings import Settings

Networks = Any
"""What `build` returned: a module, or a dictionary of modules by name."""
Batch = Any
"""What `collate` of the dataset returned, with its tensors on this rank's device."""


def model_class() -> "type[Learner]":
    """Return the class `Model` of model.py; raise UsageError if there is none."""
    found = getattr(import_module(".model", __package__), "Model", None)
    if not (isinstance(found, type) and issubclass(found, Learner)):
        raise UsageError(
            "model.py has no 'class Model(Learner)', whose methods say what is trained: learner.py "
            "has the methods, and docs/own-model.md explains them"
        )
    return found


class Learner:
    """What to train. `Model` in model.py subclasses it: `build`, `optimizers` and `loss` at least.

    Attributes:
        best: the metric that decides which checkpoint is the best, and "min" if a lower value is
            better, else "max". `runs`, sweeps and `patience` use it too.
        unit: what `batch_weight` counts, such as "tokens"; the rate in the log is named after it.
        settings: of the run, with the fields of settings.py.
    """

    best: tuple[str, Literal["min", "max"]] = ("validation/loss", "min")
    unit = "samples"

    def __init_subclass__(cls) -> None:
        """Raise UsageError for a former name, and for a hook that does not exist."""
        now = {"weigh": "batch_weight", "conclude": "compute_metrics", "units": "fsdp_units"}
        for old in now.keys() & vars(cls).keys():
            raise UsageError(f"the method {old} in model.py is now called {now[old]}: rename it")
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Learner, name):
                hooks = ", ".join(each for each in vars(Learner) if each.startswith("on_"))
                raise UsageError(f"nothing calls {name} in model.py: the hooks are {hooks}")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    # -- training ---------------------------------------------------------------------------------

    def build(self) -> nn.Module | dict[str, nn.Module]:
        """Return the network, or several by name; torch has the same seed on all ranks."""
        raise UsageError("Model in model.py has no method 'build': learner.py describes it")

    def optimizers(self, networks: Networks) -> Optimizer | dict[str, Optimizer]:
        """Return the optimizer, or several by name.

        The learning rate of a parameter group is the one that it has here, times `schedule`.
        """
        raise UsageError("Model in model.py has no method 'optimizers': learner.py describes it")

    def loss(self, networks: Networks, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, a scalar.

        If the loss itself has parameters, put it inside a network: its gradients are averaged then.
        """
        raise UsageError("Model in model.py has no method 'loss': learner.py describes it")

    def train_step(self, updater: Updater) -> None:
        """Take a step: one update by default, or several updates of different networks."""
        updater.update(self.loss)

    def batch_weight(self, batch: Batch) -> int:
        """Return how much a batch counts in means and rates; the default is its samples.

        If the loss is a mean over something else, such as tokens, return their number. A batch of
        weight 0 does not count in the loss and the gradient: its loss may be nan.
        """
        return nested.length(batch)

    def schedule(self, progress: float) -> float:
        """Return the factor on all learning rates at a progress from 0 to 1.

        The default is the setting `schedule`, with a warm-up. Override this for your own schedule.
        """
        return lr_factor(self.settings, progress)

    def fsdp_units(self, network: nn.Module) -> Iterable[nn.Module]:
        """Return the parts that FSDP gathers one at a time, the inner ones first.

        With the setting `recompute`, they are computed again one at a time.
        """
        return blocks(network)

    # -- evaluation -------------------------------------------------------------------------------

    def measure(self, networks: Networks, batch: Batch) -> Mapping[str, Any]:
        """Return sums over a batch of an evaluation by name; called without gradients.

        A tensor of any shape is summed over all batches and ranks. A tuple has the arguments of
        `update` for the object of this name in `metrics`.
        """
        loss = check_loss(self.loss(networks, batch))
        return {"loss": loss.to(sum_dtype(loss.device)) * self.batch_weight(batch)}

    def metrics(self) -> Mapping[str, Any]:
        """Return new objects with `update` and `compute` by name, such as those of torchmetrics.

        They are for metrics that are not a function of sums, such as the area under a curve.
        """
        return {}

    def compute_metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, float | Tensor]:
        """Return the metrics by name; the default divides each single number by the weight.

        Args:
            sums: of what `measure` returned, and `weight`, of all batches: float64, on the CPU.
        """
        weight = sums["weight"]
        return {
            name: total / weight
            for name, total in sums.items()
            if name != "weight" and total.numel() == 1
        }

    # -- hooks: called at events of the training; by default they do nothing ----------------------

    def on_start(self, training: Training) -> None:
        """Called on every rank before the first step of each start, also after a resume."""

    def on_step(self, training: Training) -> None:
        """Called on every rank after each step."""

    def on_evaluation_start(self, training: Training, split: str) -> None:
        """Called on every rank before an evaluation; split is "validation" or "test"."""

    def on_evaluation_end(
        self, training: Training, split: str, metrics: Mapping[str, float]
    ) -> None:
        """Called on every rank after an evaluation; metrics have names like validation/loss."""

    def on_checkpoint(self, training: Training, path: Path, best: bool) -> None:
        """Called on rank 0 soon after a checkpoint is complete; best is whether it is the best.

        The training waits for this method. Start a process for what takes long, such as an upload.
        """

    def on_end(
        self,
        training: Training,
        status: Literal["finished", "preempted", "failed"],
        error: BaseException | None,
    ) -> None:
        """Called when the training has finished, was stopped ("preempted"), or failed.

        After a failure, rank 0 alone calls this, and it can't exchange values with other ranks.
        """

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

        The result has a method `predict`, which takes a batch. If the run kept moving averages of
        the parameters (`ema`), the networks have these.

        Args:
            source: a run folder, or one of its checkpoints.
            settings: by default, those that the checkpoint was saved with.
            which: the checkpoint of a run folder. Before the first validation, the best is the
                latest.
            device: for the networks.
        """
        path = checkpoint_files.find(Path(source), which)
        whole = {"strategy": "ddp"}
        return inference.load(cls, settings or Settings, path, whole).to(device)

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments of the network's forward: the first part of a pair, or the batch."""
        return (batch[0],) if isinstance(batch, tuple | list) else (batch,)

    def predict(self, networks: Networks, batch: Batch) -> Any:  # noqa: ANN401
        """Return predictions: a tensor with a row for each sample, or several in any nesting."""
        return networks(*self.inputs(batch))

    def pretrained(self, networks: Networks) -> Any:  # noqa: ANN401 - of another library
        """Return what `export --output FOLDER` writes, by its method `save_pretrained`.

        The default is the network, which may be one of transformers. Return a part of it, or a
        tuple, such as of the network and its tokenizer.
        """
        return networks

    def describe(self, prediction: Any) -> Any:  # noqa: ANN401
        """Return the prediction for one sample as JSON can represent it, for `predict`.

        The default is all its numbers. Return less if they are many.
        """
        return nested.plain(prediction)
