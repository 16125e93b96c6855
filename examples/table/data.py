"""The datasets for training, validation and test. This file is yours: replace it with your own.

A training set is either a map-style dataset (`__len__` and `__getitem__`) or a `ShardStream`;
engine/data/steps.py compares the two. Validation and test sets are map-style. The dataset's method
`collate` makes a batch from a list of samples; the default is PyTorch's `default_collate`.
"""

import csv
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .engine import UsageError
from .settings import Settings

log = logging.getLogger(__name__)

BETWEEN = "\x1f"  # ASCII's separator of units: a number has none


@dataclass(frozen=True)
class Datasets:
    """One dataset for training, one to choose the best checkpoint, one for the final test."""

    train: Dataset
    validation: Dataset
    test: Dataset


class Table(Dataset):
    """Rows of numbers that are held in memory.

    Args:
        rows: float32 of shape (samples, columns).
        targets: float32 of shape (samples,).
    """

    def __init__(self, rows: Tensor, targets: Tensor) -> None:
        self.rows, self.targets = rows, targets

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index], self.targets[index]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a whole batch at once: rows (batch, columns) and targets (batch,)."""
        chosen = torch.as_tensor(indices)
        return self.rows[chosen], self.targets[chosen]

    @staticmethod
    def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the batch unchanged: `__getitems__` has already made it."""
        return batch


def load(settings: Settings) -> Datasets:
    """Return the datasets that the settings choose. Every rank calls this function.

    Raises:
        UsageError: the dataset is unknown, or the table can't be read or has too few rows.
    """
    if settings.dataset == "csv":
        path = Path(settings.data_dir) / settings.table
        rows, targets = with_targets(read(path, [*settings.columns, settings.target]))
    elif settings.dataset == "synthetic":
        rows, targets = synthesize(20_000, len(settings.columns), seed=1)
    else:
        raise UsageError(f"dataset is '{settings.dataset}': it must be csv or synthetic")
    held_out = int(len(rows) * settings.held_out)
    if held_out < 1 or len(rows) <= 2 * held_out:
        raise UsageError(
            f"held_out is {settings.held_out}, but the table has {len(rows)} rows: hold out at "
            "least one row twice, and not all"
        )
    # Every seed holds out the same rows, so that the results of runs can be compared.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    train, validation, test = order.split([len(rows) - 2 * held_out, held_out, held_out])
    return Datasets(*(Table(rows[part], targets[part]) for part in (train, validation, test)))


def download(settings: Settings) -> None:
    """Log where to put your table, or check that it can be read. Nothing is downloaded.

    The command `download` calls this, never a rank.

    Raises:
        UsageError: the settings ask for a table that is missing or can't be read.
    """
    path = Path(settings.data_dir) / settings.table
    if settings.dataset == "csv":
        rows = read(path, [*settings.columns, settings.target])
        log.info("%s has %d rows", path, len(rows))
    else:
        log.info(
            "the synthetic table needs no file; for your own, put it into %s, name its columns and "
            "its target in configs/train.yaml, and train with --dataset csv",
            path,
        )


def new_data(path: Path, settings: Settings) -> Table:
    """Return the rows of a CSV file to predict, which needs no target column.

    The command `predict --input` calls this.

    Raises:
        UsageError: the table can't be read.
    """
    rows = read(path, settings.columns)
    return Table(rows, torch.zeros(len(rows)))


def with_targets(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inputs, (rows, columns), and the targets, (rows,), the last column of a table."""
    return table[:, :-1].contiguous(), table[:, -1].contiguous()


def read(path: Path, used: Sequence[str]) -> Tensor:
    """Return columns of a CSV file, float32 (rows, columns).

    Args:
        path: the file. Its first line has the names of the columns, the other lines have numbers.
        used: names of the columns.

    Raises:
        UsageError: the file or a column does not exist, a row has other columns than the first
            line, or a value is not a finite number.
    """
    csv.field_size_limit(2**31 - 1)  # a text in a column that is not used may be long
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = [name.strip() for name in next(csv.reader(file), [])]
            missing = [name for name in used if name not in names]
            if missing:
                raise UsageError(
                    f"{path} has no column '{missing[0]}', only {', '.join(names)}: name those to "
                    "use with --columns and --target"
                )
            if twice := [name for name in used if names.count(name) > 1 or used.count(name) > 1]:
                raise UsageError(f"{twice[0]} is the name of two columns of {path}: rename one")
            rows = chosen_values(file, [names.index(name) for name in used], len(names))
            values = np.loadtxt(rows, np.float32, None, BETWEEN, ndmin=2)
    except FileNotFoundError:
        raise UsageError(
            f"no {path.name} in {path.parent.resolve()}: put your table there, point --data-dir at "
            "it, or use --dataset synthetic"
        ) from None
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(
            f"can't read {path} (its rows are counted without the line of names): {error}"
        ) from None
    if not len(values):
        raise UsageError(f"{path} has no row below the names of its columns: add some")
    if not np.isfinite(values).all():
        row = int(np.isfinite(values).all(axis=1).argmin())
        raise UsageError(f"{path} has a value in row {row} that is not finite: remove the row")
    return torch.from_numpy(values)


def chosen_values(lines: Iterable[str], chosen: Sequence[int], columns: int) -> Iterator[str]:
    """Yield the values of some columns of each row of a CSV file, with BETWEEN between them.

    Raises:
        ValueError: a row has more values than there are columns, or fewer. R, for example, writes
            the name of each row without a name for these names.
    """
    for number, row in enumerate(filter(None, csv.reader(lines))):
        if len(row) != columns and row[columns:] != [""]:  # a comma at the end
            raise ValueError(f"row {number} has {len(row)} values for {columns} columns")
        yield BETWEEN.join([row[each] for each in chosen])


def synthesize(samples: int, columns: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return rows of values between 0 and 1, and targets: a function of five columns, plus noise.

    The function is the first one of Friedman (1991, doi:10.1214/aos/1176347963). The same seed
    gives the same table on every rank.

    Raises:
        UsageError: `columns` is less than five.
    """
    if columns < 5:
        raise UsageError(f"there are {columns} columns: the synthetic table needs five")
    draw = np.random.default_rng(seed)
    rows = draw.random((samples, columns))
    one, two, three, four, five = rows[:, :5].T
    targets = 10 * np.sin(np.pi * one * two) + 20 * (three - 0.5) ** 2 + 10 * four + 5 * five
    targets += draw.normal(size=samples)
    return torch.from_numpy(rows).float(), torch.from_numpy(targets).float()
