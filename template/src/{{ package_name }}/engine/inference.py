"""Loads a trained network for predictions. Use it through `Model.load(RUN_DIR)` (learner.py)."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from . import checkpoint_files, nested
from .config import Settings
from .data.batches import evaluation_batches
from .errors import UsageError
from .position import Position
from .ranks.device import autocast
from .ranks.environment import bound_cpus

Own = TypeVar("Own", bound=Settings)


@dataclasses.dataclass
class Trained:
    """A learner with the networks of a checkpoint, ready to predict.

    Attributes:
        networks: a module, or a dictionary of several modules; in evaluation mode.
        step, path, position: the checkpoint's step, its file, and how far the training was.
    """

    learner: Any
    networks: Any
    settings: Any
    step: int
    path: Path
    device: torch.device
    position: Position = dataclasses.field(default_factory=Position)

    def to(self, device: torch.device | str) -> "Trained":
        """Move the networks to a device; predictions are then computed there."""
        nn.ModuleList(self.evaluated.values()).to(device)
        self.device = torch.device(device)
        return self

    @property
    def evaluated(self) -> dict[str, nn.Module]:
        """The networks by name, as `Evaluator` needs them; a single network is named `network`."""
        return self.networks if isinstance(self.networks, dict) else {"network": self.networks}

    def view(self, _modules: Mapping[str, nn.Module]) -> Any:  # noqa: ANN401 - as `build` returned
        """Return the networks as `build` returned them: one module, or a dictionary."""
        return self.networks

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


def described(learner: Any, predictions: Any, samples: int | None = None) -> list[str]:  # noqa: ANN401
    """Return the result of the learner's `describe` for each sample as JSON; null is for nan.

    Args:
        learner: a `Learner` of learner.py.
        predictions: the result of its `predict` for a batch.
        samples: number of samples in the batch, if known.

    Raises:
        UsageError: `predict` did not return a row for each sample, or JSON can't represent the
            result of `describe`.
    """
    try:
        parts = list(nested.split_samples(predictions, samples))
    except IndexError:
        raise UsageError(
            f"predict in model.py did not return one row for each of {samples or 'the'} samples: "
            "return tensors whose first dimension is the batch"
        ) from None
    found = [learner.describe(each) for each in parts]
    try:
        texts = [json.dumps(each, default=Tensor.tolist) for each in found]
        # JSON has neither nan nor inf.
        return [json.dumps(json.loads(text, parse_constant=lambda _: None)) for text in texts]
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"describe in model.py returned what JSON can't hold ({error}): return "
            "numbers, texts, tensors, lists or dictionaries"
        ) from None


def load(
    make_learner: Callable[[Own], Any],
    settings: Own | type[Own],
    path: Path,
    changes: Mapping[str, Any] | None = None,
) -> Trained:
    """Return a learner with the networks of a checkpoint; with their moving averages if it has any.

    Args:
        make_learner: makes a learner from settings.
        settings: the settings of the learner, or their class. With the class, the settings are
            those of the checkpoint, adapted to this machine.
        path: the checkpoint.
        changes: with the class, values that replace settings of the checkpoint, by name.

    Raises:
        UsageError: the checkpoint can't be read, or does not fit model.py.
    """
    state = checkpoint_files.read(path)
    if isinstance(settings, type):
        here = {"device": "auto", "backend": "auto", "world_size": None, **(changes or {})}
        settings = settings.from_values({**state["settings"], **here}, f"{path}: ")
        if settings.workers != "auto":
            workers = min(settings.workers, bound_cpus())
            settings = dataclasses.replace(settings, workers=workers)
    learner = make_learner(settings)
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(settings.seed)  # as at the start of a training
        built = learner.build()
    trained = Trained(learner, built, settings, 0, path, torch.device("cpu"))
    part = "averages" if state["averages"] else "networks"
    states = checkpoint_files.complete({part: state[part]}, path)[part]
    with checkpoint_files.fitting(path):
        for name, module in trained.evaluated.items():
            module.load_state_dict(states[name])
            module.eval()
        trained.step = state["position"]["step"]
        trained.position = Position.from_state_dict(state["position"])
    return trained
