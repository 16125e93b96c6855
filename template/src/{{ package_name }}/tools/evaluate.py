"""Evaluates a trained network on a dataset: `python -m <package> evaluate RUN_DIR`."""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import data
from ..engine.checks import part_of
from ..engine.config import read_flags
from ..engine.errors import UsageError, say
from ..engine.evaluate import Evaluation, Evaluator
from ..engine.filesystem import write_atomically
from ..engine.run.run_lock import owner_of
from ..settings import Settings
from ..trackers import select
from ..trackers.dispatch import send
from . import program, trained_network

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Flags(trained_network.Flags):
    """Evaluate a trained network as the training does, and write its metrics as JSON.

    The file is evaluation-SPLIT-STEP.json. With torchrun or srun, all ranks take part. With as many
    ranks as in the training, the metrics are the same to the last digit.
    """

    trackers: tuple[str, ...] = ()
    """trackers that get the metrics too, at the checkpoint's step;
    a number that a tracker already has is not logged again"""

    def load(self, settings: Settings) -> Any:  # noqa: ANN401 - data.py's own class
        """Return the dataset to evaluate; for "validation", a dictionary if there are several."""
        return part_of(data.load(settings), self.split, several=True)


def main(argv: Sequence[str]) -> int:
    """Write the metrics; return 0, or 1 if a tracker failed.

    Raises:
        UsageError: there is no checkpoint, it does not fit model.py, the dataset is a stream, the
            file can't be written, or the run can't be continued in the trackers.
    """
    flags = read_flags(Flags, argv, program("evaluate"))
    names, failed = select(flags.trackers), []
    with trained_network.opened(flags, {}, flags.load) as (trained, dataset, folder, world):
        if names:
            world.on_main(lambda: continued(folder, []))
        evaluator = Evaluator(trained.learner, trained, trained.settings, world)
        found = evaluator.evaluate(dataset, flags.split, trained.step)
        facts = {
            "step": trained.step,
            "checkpoint": str(trained.path),
            "split": flags.split,
            "world_size": world.size,
        }
        name = flags.split.replace("/", "-")
        output = flags.output or folder / f"evaluation-{name}-{trained.step:08}.json"
        world.on_main(lambda: write(output, facts, found))
        line = {"step": trained.step, "time": time.time(), **found.metrics}
        if names and world.is_main:
            failed = continued(folder, names, line)
    return int(bool(failed))


def write(output: Path, facts: Mapping[str, Any], found: Evaluation) -> None:
    """Write and print the metrics; raise UsageError if the file can't be written."""
    # JSON has no nan and no infinity.
    metrics = {k: value if math.isfinite(value) else None for k, value in found.metrics.items()}
    sums = {name: total.item() for name, total in found.sums.items() if total.numel() == 1}
    try:
        text = json.dumps({**facts, "metrics": metrics, "sums": sums}, indent=2)
        write_atomically(output, text + "\n")
    except OSError as error:
        raise UsageError(f"can't write {output}: {error.strerror}; change --output") from None
    for name, value in found.metrics.items():
        say(f"{name:24} {value:.6g}")
    log.info("the metrics of step %d are in %s", facts["step"], output)


def continued(folder: Path, names: Sequence[str], line: dict[str, Any] | None = None) -> list[str]:
    """Add a line of metrics to a run in trackers; return the trackers that failed.

    Raises:
        UsageError: the run still trains, or the folder is not a run folder.
    """
    if owner_of(folder):
        raise UsageError(f"{folder} is training: leave --trackers out, or wait for its end")
    try:
        settings = Settings.from_yaml(folder / "config.yaml")
        settings = dataclasses.replace(settings, run_dir=str(folder.absolute()))
        return send(names, settings, line)
    except (OSError, ValueError, UsageError) as error:
        raise UsageError(
            f"--trackers needs the files of a run in {folder} ({error}): leave it out, or name a "
            "run folder"
        ) from None
