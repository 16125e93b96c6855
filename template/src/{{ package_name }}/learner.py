"""The base class of `Model` in model.py.

A `Learner` defines the networks, their optimizers, the loss of a batch, and the metrics of an
evaluation. Everything else (ranks, batches, checkpoints, trackers) is the same for all models.
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .engine import checkpoint_files, inference, nested
from .engine.checks import check_loss
from .engine.errors import UsageError
from .engine.ranks.device import sum_dtype
from .engine.ranks.strategy import blocks
from .engine.schedule import lr_factor
from .engine.updater import Updater
from .settings import Settings

if TYPE_CHECKING:
    from .engine import Training

Networks = Any
"""The result of `build`: a module, or a dictionary of modules by name."""
Batch = Any
"""The result of the dataset's `collate`, with its tensors on this rank's device."""


def model_class() -> "type[Learner]":
    """Return the class `Model` of model.py.

    Raises:
        UsageError: model.py has no such class, or it is not a `Learner`.
    """
    found = getattr(import_module(".model", __package__), "Model", None)
    if not (isinstance(found, type) and issubclass(found, Learner)):
        raise UsageError(
            "model.py has no 'class Model(Learner)': add it with the methods of learner.py, as "
            "docs/own-model.md explains"
        )
    return found


class Learner:
    """What to train. `Model` in model.py overrides at least `build`, `optimizers` and `loss`.

    Attributes:
        best: name of the metric that decides which checkpoint is the best, and "min" if lower
            values are better, or "max". The command `runs`, sweeps and `patience` use it too.
        unit: what `batch_weight` counts, such as "tokens". The log names the training rate after
            it.
        settings: settings of the run, with the fields of settings.py.
    """

    best: tuple[str, Literal["min", "max"]] = ("validation/loss", "min")
    unit = "samples"

    def __init_subclass__(cls) -> None:
        """Check the names of the methods.

        Raises:
            UsageError: a method has the name of a hook that does not exist.
        """
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Learner, name):
                hooks = ", ".join(each for each in vars(Learner) if each.startswith("on_"))
                raise UsageError(f"{name} in model.py is not a hook: the hooks are {hooks}")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    # -- training ---------------------------------------------------------------------------------

    def build(self) -> nn.Module | dict[str, nn.Module]:
        """Return the network, or a dictionary of networks by name.

        PyTorch's random seed is the same on all ranks, so all ranks get the same parameters.
        """
        raise UsageError("Model in model.py has no method 'build': add it, as in learner.py")

    def optimizers(self, networks: Networks) -> Optimizer | dict[str, Optimizer]:
        """Return the optimizer, or a dictionary of optimizers by name.

        In training, each parameter group has the learning rate that it gets here, times the factor
        of `schedule` and of the setting `lr_scaling`.
        """
        raise UsageError("Model in model.py has no method 'optimizers': add it, as in learner.py")

    def loss(self, networks: Networks, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, a scalar.

        If the loss has parameters of its own, make it a part of a network, so that their gradients
        are averaged over the ranks.
        """
        raise UsageError("Model in model.py has no method 'loss': add it, as in learner.py")

    def train_step(self, updater: Updater) -> None:
        """Take a step. The default is one update; a GAN, for example, updates each network."""
        updater.update(self.loss)

    def batch_weight(self, batch: Batch) -> int:
        """Return the weight of a batch in means and rates; the default is its number of samples.

        If the loss is a mean over something else, such as tokens, return their number. A batch with
        weight 0 does not contribute to the loss and the gradient, so its loss may be nan.
        """
        return nested.length(batch)

    def schedule(self, progress: float) -> float:
        """Return the factor by which all learning rates are multiplied.

        The default follows the settings `schedule` and `warmup`. Override this method for a
        schedule of your own.

        Args:
            progress: share of the training that is done, from 0 to 1.
        """
        return lr_factor(self.settings, progress)

    def fsdp_units(self, network: nn.Module) -> Iterable[nn.Module]:
        """Return the parts of a network that FSDP gathers one at a time, inner parts first.

        With the setting `recompute`, activation checkpointing applies to each of these parts.
        """
        return blocks(network)

    # -- evaluation -------------------------------------------------------------------------------

    def measure(self, networks: Networks, batch: Batch) -> Mapping[str, Any]:
        """Return sums over a batch of an evaluation, by name. It is called without gradients.

        A value is a tensor of any shape, which is summed over all batches and ranks. Or it is a
        tuple: the arguments of `update` for the object with this name in `metrics`.
        """
        loss = check_loss(self.loss(networks, batch))
        return {"loss": loss.to(sum_dtype(loss.device)) * self.batch_weight(batch)}

    def metrics(self) -> Mapping[str, Any]:
        """Return new metric objects by name, with `update` and `compute` as in torchmetrics.

        Use them for metrics that can't be computed from sums, such as the area under a curve.
        """
        return {}

    def compute_metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, float | Tensor]:
        """Return the metrics by name. The default divides each scalar sum by the weight.

        Args:
            sums: the results of `measure`, summed over all batches and ranks, and `weight`, the sum
                of `batch_weight`: float64 tensors on the CPU.
        """
        weight = sums["weight"]
        return {
            name: total / weight
            for name, total in sums.items()
            if name != "weight" and total.numel() == 1
        }

    # -- hooks: called at events of the training; the defaults do nothing -------------------------

    def on_start(self, training: "Training") -> None:
        """Called on every rank before the first step of a start or resume."""

    def on_step(self, training: "Training") -> None:
        """Called on every rank after each step."""

    def on_log(self, training: "Training") -> None:
        """Called on every rank before a line of metrics is logged; `record` adds to the line."""

    def on_evaluation_start(self, training: "Training", split: str) -> None:
        """Called on every rank before an evaluation; `split` is "validation" or "test"."""

    def on_evaluation_end(
        self, training: "Training", split: str, metrics: Mapping[str, float]
    ) -> None:
        """Called on every rank after an evaluation; `metrics` has names like "validation/loss"."""

    def on_save(self, training: "Training") -> None:
        """Called on every rank before a checkpoint is copied and written."""

    def on_checkpoint(self, training: "Training", path: Path, best: bool) -> None:
        """Called on rank 0 soon after a checkpoint is complete. `best`: whether it is the best.

        The training waits for this method. Start a process for work that takes long, such as an
        upload.
        """

    def on_summary(self, training: "Training", summary: dict[str, Any]) -> None:
        """Called on every rank before summary.json is written. Add what JSON can hold."""

    def on_end(
        self,
        training: "Training",
        status: Literal["finished", "preempted", "failed"],
        error: BaseException | None,
    ) -> None:
        """Called on every rank when the training has finished or was stopped by a signal.

        `status` is then "finished" or "preempted". After a failure, only rank 0 calls this, and it
        can't communicate with other ranks.
        """

    def on_close(self, training: "Training", error: BaseException | None) -> None:
        """Called on every rank at the very end, after the trackers, also if an error ends the run.

        It can't communicate with other ranks.
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
        the parameters (setting `ema`), the networks have these averages.

        Args:
            source: a run folder, or one of its checkpoints.
            settings: the default is the settings that the checkpoint was saved with.
            which: which checkpoint of a run folder to load. Before the first validation, "best" is
                the latest.
            device: where to put the networks.
        """
        path = checkpoint_files.find(Path(source), which)
        whole = {"strategy": "ddp"}
        return inference.load(cls, settings or Settings, path, whole).to(device)

    def inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the arguments of the network's `forward` for a batch.

        The default is the first element of a tuple or list, or else the whole batch.
        """
        return (batch[0],) if isinstance(batch, tuple | list) else (batch,)

    def predict(self, networks: Networks, batch: Batch) -> Any:  # noqa: ANN401
        """Return predictions: a tensor with a row for each sample, or a nesting of such tensors."""
        return networks(*self.inputs(batch))

    def pretrained(self, networks: Networks) -> Any:  # noqa: ANN401 - of another library
        """Return the object that `export --output FOLDER` writes with its method `save_pretrained`.

        The default is the network itself, which may be a model of Hugging Face's transformers.
        Return a part of it, or a tuple, such as the network and its tokenizer.
        """
        return networks

    def describe(self, prediction: Any) -> Any:  # noqa: ANN401
        """Return the prediction for one sample as values that JSON can represent.

        The command `predict` writes them. The default is all numbers of the prediction; return
        fewer if there are many.
        """
        return nested.map_tensors(Tensor.tolist, prediction)
