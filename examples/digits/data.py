"""The datasets for training, validation and test. This file is yours: replace it with your own.

A training set is either a map-style dataset (`__len__` and `__getitem__`) or a `ShardStream`;
engine/data/steps.py compares the two. Validation and test sets are map-style. The dataset's method
`collate` makes a batch from a list of samples; the default is PyTorch's `default_collate`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from . import mnist
from .engine import ShardStream, UsageError
from .settings import Settings


@dataclass(frozen=True)
class Datasets:
    """One dataset for training, one to choose the best checkpoint, one for the final test."""

    train: Dataset
    validation: Dataset
    test: Dataset


class Digits(Dataset):
    """Images of digits that are held in memory.

    Args:
        images: uint8 of shape (samples, 28, 28).
        labels: int64 of shape (samples,).
    """

    MEAN, DEVIATION = 33.3, 78.6  # of the pixels of MNIST's training set

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels
        self.names: list[str] = []  # of the files, for `predict`

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        images, labels = self.__getitems__([index])
        return images[0], int(labels[0])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return a whole batch at once: images, float (batch, 1, 28, 28), and labels (batch,)."""
        chosen = torch.as_tensor(indices)
        images = self.images[chosen].unsqueeze(1).float()
        return images.sub_(self.MEAN).div_(self.DEVIATION), self.labels[chosen]

    @staticmethod
    def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the batch unchanged: `__getitems__` has already made it."""
        return batch

    def as_stream(self, shard_size: int = 1000) -> ShardStream:
        """Return the same samples as a stream of shards, to show how one is made."""
        shards = [
            range(first, min(first + shard_size, len(self)))
            for first in range(0, len(self), shard_size)
        ]
        return ShardStream(shards, self.read, length=len(self))

    def read(self, shard: range) -> Iterator[tuple[Tensor, int]]:
        """Yield the samples of a shard one by one."""
        return (self[index] for index in shard)


def load(settings: Settings) -> Datasets:
    """Return the datasets that the settings choose. Every rank calls this function.

    Raises:
        UsageError: the dataset is unknown, a file is missing or damaged, or the validation set
            would have no samples or all of them.
    """
    if settings.dataset == "mnist":
        folder = Path(settings.data_dir)
        images, labels = mnist.read(folder, "train")
        test = Digits(*mnist.read(folder, "t10k"))
    elif settings.dataset == "synthetic":
        images, labels = mnist.synthesize(20_000, seed=1)
        test = Digits(*mnist.synthesize(1_001, seed=2))
    else:
        raise UsageError(f"dataset is '{settings.dataset}': it must be mnist or synthetic")
    held_out = settings.validation_size
    if not 0 < held_out < len(labels):
        raise UsageError(
            f"validation_size is {held_out}, but the training set has {len(labels)} samples: "
            "hold out at least one and not all"
        )
    train = Digits(images[:-held_out], labels[:-held_out])
    return Datasets(
        train=train.as_stream() if settings.streaming else train,
        validation=Digits(images[-held_out:], labels[-held_out:]),
        test=test,
    )


def new_data(path: Path, _settings: Settings) -> Digits:
    """Return digits to predict from an image, or from all .png and .jpg files of a folder.

    The command `predict --input` calls this. The digits should be white on black, as in MNIST.

    Raises:
        UsageError: a file is not an image, or the folder has none.
    """
    from PIL import Image

    found = sorted(path.glob("[!.]*")) if path.is_dir() else [path]
    paths = [each for each in found if each.suffix.lower() in (".png", ".jpg", ".jpeg")]
    if not paths:
        raise UsageError(f"no .png or .jpg file in {path}: --input takes one, or a folder of them")
    try:
        images = [np.asarray(Image.open(each).convert("L").resize((28, 28))) for each in paths]
    except OSError as error:
        raise UsageError(f"can't read an image in {path}: {error}") from None
    digits = Digits(torch.from_numpy(np.stack(images)), torch.zeros(len(images), dtype=torch.int64))
    digits.names = [each.name for each in paths]
    return digits


def download(settings: Settings) -> None:
    """Download the dataset to `data_dir`. The command `download` calls this, never a rank."""
    mnist.download(Path(settings.data_dir))
