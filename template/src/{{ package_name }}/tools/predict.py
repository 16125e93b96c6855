"""Writes the predictions for a whole dataset to a file: `python -m <package> predict RUN_DIR`."""

import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.utils.data import Dataset

from .. import data
from ..engine.checks import part_of
from ..engine.config import read_flags
from ..engine.data.batches import evaluation_batches
from ..engine.data.seeds import derive, seed_generators
from ..engine.errors import UsageError
from ..engine.filesystem import write_atomically
from ..engine.inference import Trained, described
from ..engine.ranks.world import World
from ..settings import Settings
from . import program, trained_network

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Flags(trained_network.Flags):
    """Predict with a trained network, and write a line of JSON for each sample, in their order.

    The file is predictions-SPLIT.jsonl. With torchrun or srun, all ranks take part.
    """

    input: Path | None = None
    """file or folder with new data, which `new_data` in data.py reads; it replaces --split.
    The file to write is then predictions-NAME.jsonl"""

    def load(self, settings: Settings) -> Dataset:
        """Return the dataset to predict."""
        if not self.input:
            return part_of(data.load(settings), self.split)
        if not hasattr(data, "new_data"):
            raise UsageError("--input needs new_data(path, settings) in data.py: write it first")
        if not self.input.exists():
            raise UsageError(f"--input is {self.input}, which does not exist")
        return data.new_data(self.input, settings)


def main(argv: Sequence[str]) -> int:
    """Write the predictions; return 0.

    Raises:
        UsageError: there is no checkpoint, it does not fit model.py, the dataset is a stream, or
            the file can't be written.
    """
    flags = read_flags(Flags, argv, program("predict"))
    whole = {"strategy": "ddp"}  # not fsdp: only rank 0 may have a last batch
    with trained_network.opened(flags, whole, flags.load) as (trained, dataset, folder, world):
        name = flags.input.stem if flags.input else flags.split.replace("/", "-")
        output = flags.output or folder / f"predictions-{name}.jsonl"
        lines = predictions(trained, dataset, trained.settings.test_batch_size, world)
        try:
            if world.is_main:
                write_atomically(output, lambda file: file.writelines(lines))
                log.info("%d predictions of step %d in %s", len(dataset), trained.step, output)
            else:
                list(lines)  # sends the predictions to rank 0
        except OSError as error:
            raise UsageError(f"can't write {output}: {error.strerror}; change --output") from None
    return 0


def predictions(
    trained: Trained, dataset: Dataset, batch_size: int, world: World
) -> Iterator[bytes]:
    """Yield `describe` of each sample's prediction as a line of JSON, in the order of the samples.

    All ranks must iterate, but only rank 0 gets the predictions. In each round, each rank predicts
    one batch, so that rank 0 holds at most one batch of each rank. If the dataset has `names`, such
    as those of files, a line has the name of its sample, too.

    Raises:
        UsageError: `predict` does not return a row for each sample, or JSON can't represent the
            result of `describe`.
    """
    length = len(dataset)  # type: ignore[arg-type]
    seed_generators(derive("predictions", trained.settings.seed, world.rank, trained.step))
    mine = range(world.rank, length, world.size)
    batches = evaluation_batches(dataset, mine, batch_size, trained.settings.workers)
    for start in range(0, len(range(0, length, world.size)), batch_size):
        rows: list[bytes] = []
        if samples := len(mine[start : start + batch_size]):
            lines = described(trained.learner, trained.predict(next(batches)), samples)
            if names := getattr(dataset, "names", None):
                chosen = (json.dumps(names[each]) for each in mine[start : start + batch_size])
                lines = [
                    f'{{"name": {name}, "prediction": {line}}}'
                    for name, line in zip(chosen, lines, strict=True)
                ]
            rows = [f"{line}\n".encode() for line in lines]
        gathered = world.gather(rows)
        if world.is_main:
            for turn in range(batch_size):
                yield from (each[turn] for each in gathered if turn < len(each))
