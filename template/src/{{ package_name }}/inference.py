"""Use of a trained network: in a notebook, and for the predictions of a whole dataset.

from <package>.inference import load
run = load("runs/demo/7")   # then run.predict(batch)
"""

import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch.utils.data import Dataset, IterableDataset

from . import data, nested, restore
from .checkpoint import Checkpoints
from .config import Settings, load_yaml
from .distributed import World, autocast, joined, set_up_logging
from .errors import UsageError
from .files import write_atomically
from .learner import Learner, model_class
from .seeding import seed_torch
from .sharding import evaluation_batches

log = logging.getLogger(__name__)

Split = Literal["train", "validation", "test"]


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
    path = _checkpoint(Path(source), which)
    folder = path.parent.parent
    settings = settings or load_yaml(folder / "config.yaml")
    state = restore.load(path)
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


def _checkpoint(source: Path, which: str) -> Path:
    if not source.is_dir():
        return source
    checkpoints = Checkpoints(source / "checkpoints")
    found = checkpoints.best() if which == "best" else checkpoints.latest()
    if found is None:
        raise UsageError(f"{source} has no {which} checkpoint: name a run folder that has one")
    return found


@dataclasses.dataclass(frozen=True)
class Flags:
    """Predict with a trained network, and write a line of JSON for each sample, in their order.

    Alone, or on all ranks that torchrun or srun started.
    """

    run: tyro.conf.Positional[Path]
    """run folder, or one of its checkpoints"""
    split: Split = "test"
    """which samples of data.py"""
    checkpoint: Literal["best", "latest"] = "best"
    """which checkpoint of the run folder"""
    output: Path | None = None
    """file to write; else predictions-SPLIT.jsonl in the run folder"""
    data_dir: str | None = None
    """folder of the dataset's files; else that of the run"""
    batch_size: int | None = None
    """samples a rank takes at once; else the run's test_batch_size"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """as for train"""


def main(argv: Sequence[str]) -> int:
    """Write the predictions; return 0.

    Raises:
        UsageError: there is no checkpoint, it does not fit model.py, or the split can't be indexed.
    """
    flags = tyro.cli(Flags, args=list(argv), prog=f"python -m {__package__} predict")
    path = _checkpoint(flags.run, flags.checkpoint)
    settings = for_use(path, flags.device, flags.data_dir)
    output = flags.output or path.parent.parent / f"predictions-{flags.split}.jsonl"
    with joined(settings) as world:
        set_up_logging(world, all_ranks=False)
        trained = load(path, settings, device=world.device)
        dataset = getattr(data.load(settings), flags.split)
        if isinstance(dataset, IterableDataset):
            raise UsageError(f"the {flags.split} set is a stream: predict takes sets with an index")
        lines = predictions(trained, dataset, flags.batch_size or settings.test_batch_size, world)
        encoded = (json.dumps(line).encode() + b"\n" for line in lines)
        if world.is_main:
            _write(output, encoded)
            log.info("%d predictions of step %d in %s", len(dataset), trained.step, output)
        else:
            for _ in encoded:
                pass
    return 0


def for_use(path: Path, device: str, data_dir: str | None) -> Settings:
    """Return the settings of a checkpoint's run, for another place than that of the training."""
    config = path.parent.parent / "config.yaml"
    settings = load_yaml(config)
    own = {"device": device, "backend": "auto", "world_size": None, "strategy": "ddp"}
    return dataclasses.replace(settings, **own, data_dir=data_dir or settings.data_dir)


def predictions(trained: Trained, dataset: Dataset, batch_size: int, world: World) -> Iterator[Any]:
    """Yield on rank 0 what `describe` makes of each sample's prediction, in the order of samples.

    Every rank must iterate; on the others there is nothing to see. Ranks take the samples in
    turns, a batch each, so that rank 0 holds no more than a batch of each.
    """
    length = len(dataset)  # type: ignore[arg-type]
    seed_torch("predictions", trained.settings.seed, world.rank, trained.step)
    mine = range(world.rank, length, world.size)
    batches = evaluation_batches(dataset, mine, batch_size, trained.settings.workers)
    for number in range(math.ceil(len(range(0, length, world.size)) / batch_size)):
        rows: list[Any] = []
        samples = min(batch_size, len(mine) - number * batch_size)
        if samples > 0:
            found = trained.predict(next(batches))
            rows = [trained.learner.describe(each) for each in nested.split(found, samples)]
        gathered = world.gather_on_main(rows)
        for turn in range(batch_size):
            yield from (each[turn] for each in gathered if turn < len(each))


def _write(path: Path, lines: Iterator[bytes]) -> None:
    try:
        write_atomically(path, lambda file: file.writelines(lines))
    except OSError as error:
        raise UsageError(
            f"can't write {path}: {error.strerror}; choose another with --output"
        ) from None
