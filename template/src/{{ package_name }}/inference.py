"""Use of a trained network, such as in a notebook.

from <package>.inference import load
run = load("runs/demo/7")   # then run.predict(batch)
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from .core import nested
from .core.errors import UsageError
from .core.loading.batches import evaluation_batches
from .core.ranks.device import autocast
from .core.ranks.environment import bound_cpus
from .core.training import checkpoint
from .learner import Learner, model_class
from .settings import Settings

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Trained:
    """A learner with the networks of a checkpoint, ready to predict.

    Attributes:
        networks: in evaluation mode: a module, or a dictionary of several.
        step: of the checkpoint; path: its file.
    """

    learner: Learner
    networks: Any
    settings: Settings
    step: int
    path: Path
    device: torch.device

    @torch.no_grad()
    def predict(self, batch: Any) -> Any:  # noqa: ANN401 - what the learner takes and returns
        """Return the predictions for a batch, as data.py makes batches, on the CPU."""
        batch = nested.to_device(batch, self.device)
        with autocast(self.device, self.settings.precision):
            return nested.to_cpu(self.learner.predict(self.networks, batch))

    def example(self, dataset: Dataset, samples: int) -> Any:  # noqa: ANN401 - a batch
        """Return the first samples of a map-style dataset as a batch, as evaluations read it."""
        samples = min(samples, len(dataset))  # type: ignore[arg-type]
        return next(evaluation_batches(dataset, range(samples), samples, 0))


def load(
    source: str | Path,
    settings: Settings | None = None,
    which: str = "best",
    device: torch.device | str = "cpu",
) -> Trained:
    """Return the trained networks of a run, from its averages where it has some.

    Args:
        source: a run folder, or one of its checkpoints.
        settings: else those of the run.
        which: of a run folder: "best", or "latest".
        device: where to.

    Raises:
        UsageError: there is no checkpoint, or it does not fit model.py.
    """
    path = checkpoint.find(Path(source), which)
    settings = settings or settings_of(path)
    state = checkpoint.load(path)
    learner = model_class()(settings)
    built = learner.build()
    modules = {"network": built} if isinstance(built, torch.nn.Module) else built
    states = state["averages"] or state["networks"]
    try:
        for name, module in modules.items():
            module.load_state_dict(states[name])
            module.to(device).eval()
    except (KeyError, RuntimeError) as error:
        raise UsageError(
            f"{path} does not fit model.py ({str(error).split(chr(9))[-1]}): bring back the model "
            "that it was saved from"
        ) from None
    step = state["position"]["step"]
    return Trained(learner, built, settings, step, path, torch.device(device))


def settings_of(path: Path) -> Settings:
    """Return the settings that a checkpoint was saved with, wherever it lies now.

    Raises:
        UsageError: it can't be read, or one of them is no longer valid.
    """
    saved = checkpoint.saved_settings(path)
    known = {field.name for field in dataclasses.fields(Settings)}
    if gone := saved.keys() - known:
        log.warning("%s has settings that this project lacks: %s", path, ", ".join(sorted(gone)))
    return Settings.from_values(saved, f"{path}: ")


def for_use(path: Path, device: str, data_dir: str | None) -> Settings:
    """Return the settings of a checkpoint for another place than that of the training."""
    settings = settings_of(path)
    workers = settings.workers
    own: dict[str, Any] = {
        "workers": workers if workers == "auto" else min(workers, bound_cpus()),
        "device": device,
        "backend": "auto",
        "world_size": None,
        "strategy": "ddp",
    }
    return dataclasses.replace(settings, **own, data_dir=data_dir or settings.data_dir)
