"""A trained network, ready to predict. Use it through `Model.load(RUN_DIR)` (learner.py)."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset

from . import checkpoint_files, nested
from .config import Settings
from .data.batches import evaluation_batches
from .errors import UsageError
from .ranks.device import autocast
from .ranks.environment import bound_cpus

Own = TypeVar("Own", bound=Settings)


@dataclasses.dataclass
class Trained:
    """A learner with the networks of a checkpoint, ready to predict.

    `networks` are in evaluation mode: a module, or a dictionary of several. `step` and `path` are
    those of the checkpoint.
    """

    learner: Any
    networks: Any
    settings: Any
    step: int
    path: Path
    device: torch.device

    def to(self, device: torch.device | str) -> "Trained":
        """Move the networks to a device, on which they then predict."""
        several = isinstance(self.networks, dict)
        nn.ModuleList(self.networks.values() if several else [self.networks]).to(device)
        self.device = torch.device(device)
        return self

    @torch.no_grad()
    def predict(self, batch: Any) -> Any:  # noqa: ANN401 - what the learner takes and returns
        """Return the predictions for a batch, on the CPU."""
        batch = nested.to_device(batch, self.device)
        with autocast(self.device, self.settings.precision):
            return nested.to_cpu(self.learner.predict(self.networks, batch))

    def example(self, dataset: Dataset, samples: int) -> Any:  # noqa: ANN401 - a batch
        """Return the first samples of a map-style dataset as a batch."""
        samples = min(samples, len(dataset))  # type: ignore[arg-type]
        return next(evaluation_batches(dataset, range(samples), samples, 0))


def load(make_learner: Callable[[Own], Any], settings: Own | type[Own], path: Path) -> Trained:
    """Return a learner with the networks of a checkpoint, or with their averages if it has some.

    The settings are for the learner. Instead of them, the class takes those of the checkpoint, and
    changes them for this machine. Raises UsageError if the checkpoint does not fit model.py.
    """
    state = checkpoint_files.load(path)
    if isinstance(settings, type):
        saved = settings.from_values(state["settings"], f"{path}: ")
        here: dict[str, Any] = {"device": "auto", "backend": "auto", "strategy": "ddp"}
        here["world_size"] = None
        if saved.workers != "auto":
            here["workers"] = min(saved.workers, bound_cpus())
        settings = dataclasses.replace(saved, **here)
    learner = make_learner(settings)
    built = learner.build()
    modules = {"network": built} if isinstance(built, nn.Module) else built
    states = state["averages"] or state["networks"]
    try:
        for name, module in modules.items():
            module.load_state_dict(states[name])
            module.eval()
        step, cpu = state["position"]["step"], torch.device("cpu")
        return Trained(learner, built, settings, step, path, cpu)
    except (KeyError, RuntimeError) as error:
        raise UsageError(
            f"{path} does not fit model.py ({str(error).split(chr(9))[-1]}): restore the model "
            "that it was saved from"
        ) from None
