"""A trained network, ready to predict. Use it through `Model.load(RUN_DIR)` (learner.py)."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import Dataset

from . import checkpoint_files, nested
from .config import Settings
from .data.batches import evaluation_batches
from .errors import UsageError
from .ranks.device import autocast
from .ranks.environment import bound_cpus

log = logging.getLogger(__name__)

Own = TypeVar("Own", bound=Settings)


@dataclasses.dataclass
class Trained:
    """A learner with the networks of a checkpoint, ready to predict.

    Attributes:
        learner: an instance of `Model`.
        networks: in evaluation mode: a module, or a dictionary of several.
        settings: of the learner.
        step: of the checkpoint. path: of its file.
        device: of the networks.
    """

    learner: Any
    networks: Any
    settings: Any
    step: int
    path: Path
    device: torch.device

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


def load(
    make_learner: Callable[[Own], Any], settings: Own, path: Path, device: torch.device | str
) -> Trained:
    """Return a learner with the networks of a checkpoint, or with their averages if it has some.

    Args:
        make_learner: the class `Model` of model.py.
        settings: for the learner.
        path: of the checkpoint.
        device: for the networks.

    Raises:
        UsageError: the checkpoint can't be read, or does not fit model.py.
    """
    state = checkpoint_files.load(path)
    learner = make_learner(settings)
    built = learner.build()
    modules = {"network": built} if isinstance(built, torch.nn.Module) else built
    states = state["averages"] or state["networks"]
    try:
        for name, module in modules.items():
            module.load_state_dict(states[name])
            module.to(device).eval()
    except (KeyError, RuntimeError) as error:
        raise UsageError(
            f"{path} does not fit model.py ({str(error).split(chr(9))[-1]}): restore the model "
            "that it was saved from"
        ) from None
    step = state["position"]["step"]
    return Trained(learner, built, settings, step, path, torch.device(device))


def saved_settings(settings_class: type[Own], path: Path) -> Own:
    """Return the settings that a checkpoint was saved with.

    Args:
        settings_class: the class `Settings` of settings.py.
        path: of the checkpoint.

    Raises:
        UsageError: it can't be read, or one of its settings is no longer valid.
    """
    saved = checkpoint_files.saved_settings(path)
    known = {field.name for field in dataclasses.fields(settings_class)}
    if gone := saved.keys() - known:
        log.warning("settings of %s that this project lacks: %s", path, ", ".join(sorted(gone)))
    return settings_class.from_values(saved, f"{path}: ")


def for_use(settings: Own, device: str, data_dir: str | None) -> Own:
    """Return the settings of a training, changed to use its networks on this machine."""
    workers = settings.workers
    own: dict[str, Any] = {
        "workers": workers if workers == "auto" else min(workers, bound_cpus()),
        "device": device,
        "backend": "auto",
        "world_size": None,
        "strategy": "ddp",
    }
    return dataclasses.replace(settings, **own, data_dir=data_dir or settings.data_dir)
