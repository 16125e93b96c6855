"""The datasets for training, validation and test. This file is yours: replace it with your own.

A training set is either a map-style dataset (`__len__` and `__getitem__`) or a `ShardStream`;
engine/data/steps.py compares the two. Validation and test sets are map-style. The dataset's method
`collate` makes a batch from a list of samples; the default is PyTorch's `default_collate`.
"""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .engine import ShardStream, UsageError, write_atomically
from .files import ENDINGS, SHARDS, Files, Images, Sample, say_left_out
from .settings import Settings
from .transforms import augment, center

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Datasets:
    """One dataset for training, one to choose the best checkpoint, one for the final test."""

    train: Dataset
    validation: Dataset
    test: Dataset


@dataclass(frozen=True)
class Decoder:
    """Turns a stored image into pixels, uint8 (size, size, 3), and its class.

    Attributes:
        transform: makes the pixels: `augment` or `center`.
        classes: number of classes.
    """

    transform: Callable[[Sample], Tensor]
    classes: int

    def __call__(self, sample: Sample) -> tuple[Tensor, int]:
        if not 0 <= sample.label < self.classes:
            raise UsageError(
                f"{sample.name} is of class {sample.label}, but there are {self.classes}, counted "
                "from 0: write their number to configs/train.yaml"
            )
        return self.transform(sample), sample.label


class ByIndex(Dataset):
    """Stored images by index, decoded on access."""

    def __init__(self, images: Images, decode: Decoder) -> None:
        self.images, self.decode = images, decode

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.decode(self.images[index])


class Stripes(Dataset):
    """Synthetic images, drawn on access: stripes with noise. Their direction is the class.

    The same seed gives the same images on every rank.
    """

    def __init__(self, samples: int, classes: int, size: int, seed: int) -> None:
        self.samples, self.classes, self.size, self.seed = samples, classes, size, seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = np.random.default_rng((self.seed, index))
        label = index % self.classes
        angle = np.pi * label / self.classes
        places = np.arange(self.size) * draw.uniform(0.5, 0.9)
        across = np.cos(angle) * places + np.sin(angle) * places[:, None] + draw.uniform(0, 6)
        color = draw.uniform(20, 50, 3)
        image = 128 + np.sin(across)[:, :, None] * color + draw.normal(0, 30, (*across.shape, 3))
        return torch.from_numpy(image.clip(0, 255).astype(np.uint8)), label


def load(settings: Settings) -> Datasets:
    """Return the datasets that the settings choose. Every rank calls this function.

    Raises:
        UsageError: the dataset is unknown, or its files are missing or can't be read.
    """
    size = settings.size
    if settings.dataset == "synthetic":
        lengths = (4000, 400, 1001)
        parts = [Stripes(length, settings.classes, size, n) for n, length in enumerate(lengths)]
        return Datasets(*parts)
    if settings.dataset not in ("files", *SHARDS):
        raise UsageError(
            f"dataset is '{settings.dataset}': it must be files, tar, parquet or synthetic"
        )
    folder = Path(settings.data_dir)
    decode = Decoder(partial(augment, size=size, least=settings.least_crop), settings.classes)
    train: Dataset
    if settings.dataset == "files":
        train = ByIndex(find(folder / "train", settings), decode)
    else:
        paths = shards(folder / "train", settings.dataset)
        read = SHARDS[settings.dataset].read
        sizes = known_sizes(sizes_file(settings), paths)
        train = ShardStream(paths, read, settings.samples, decode=decode, sizes=sizes)
    # Some datasets, such as ImageNet, publish no classes for the test set: use the validation set.
    last = "test" if (folder / "test").is_dir() else "validation"
    decode = Decoder(partial(center, size=size), settings.classes)
    validation, test = (
        ByIndex(find(folder / part, settings), decode) for part in ("validation", last)
    )
    return Datasets(train, validation, test)


class Loose(Dataset):
    """Image files without classes, which `predict --input` reads."""

    def __init__(self, paths: Sequence[Path], decode: Decoder) -> None:
        self.paths, self.decode = paths, decode
        self.names = [path.name for path in paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        return self.decode(Sample(str(path), path.read_bytes(), 0))


def new_data(path: Path, settings: Settings) -> Loose:
    """Return images to predict: a file, or all images of a folder in the order of their names.

    The command `predict --input` calls this.

    Raises:
        UsageError: there is no image.
    """
    found = sorted(path.glob("[!.]*")) if path.is_dir() else [path]
    paths = [each for each in found if each.suffix[1:].lower() in ENDINGS]
    if not paths:
        raise UsageError(f"no image in {path}: --input takes one, or a folder of them")
    return Loose(paths, Decoder(partial(center, size=settings.size), settings.classes))


def find(folder: Path, settings: Settings) -> Images:
    """Return the images of a folder, by index.

    Raises:
        UsageError: the folder has no image, it has a class that the training set lacks, or there
            are more classes than the setting `classes` says.
    """
    if settings.dataset != "files":
        return SHARDS[settings.dataset](shards(folder, settings.dataset))
    # The training set numbers the classes, even if this folder has no images of some of them.
    classes = subfolders(Path(settings.data_dir) / "train")
    images = Files(folder, classes)
    if unknown := set(subfolders(folder)) - set(classes):
        raise UsageError(f"{folder} has a class {min(unknown)}, which the training set lacks")
    if not images.places:
        raise UsageError(
            f"no image in {folder.resolve()}: put yours there as CLASS/NAME.jpg, point --data-dir "
            "at the folder above it, or use --dataset synthetic"
        )
    if len(classes) > settings.classes:
        raise UsageError(
            f"{folder} has {len(classes)} folders of classes, but classes is {settings.classes}: "
            "write their number to configs/train.yaml"
        )
    return images


def subfolders(folder: Path) -> list[str]:
    """Return the sorted names of the folders in a folder, without hidden folders."""
    return sorted(path.name for path in folder.glob("[!.]*") if path.is_dir())


def shards(folder: Path, kind: str) -> list[str]:
    """Return the paths of the shards in a folder, sorted by name.

    Raises:
        UsageError: the folder has no shard.
    """
    paths = sorted(map(str, folder.glob(f"[!.]*.{kind}")))
    if not paths:
        raise UsageError(
            f"no .{kind} file in {folder.resolve()}: put your shards there, point --data-dir at "
            "the folder above it, or use --dataset synthetic"
        )
    say_left_out([str(path) for path in folder.glob("*") if str(path) not in paths])
    return paths


def sizes_file(settings: Settings) -> Path:
    """Return the path of the file with the number of images in each training shard."""
    return Path(settings.data_dir) / f"{settings.dataset}-sizes.json"


def known_sizes(file: Path, paths: Sequence[str]) -> list[int] | None:
    """Return the number of images in each shard, or None if they were not counted.

    Raises:
        UsageError: the file is damaged, or a shard was added after the images were counted.
    """
    if not file.exists():
        return None
    try:
        counts = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        counts = None
    if not isinstance(counts, dict) or any(type(each) is not int for each in counts.values()):
        raise UsageError(f"{file} is damaged: remove it, and run 'make data' to count again")
    missing = [Path(path).name for path in paths if Path(path).name not in counts]
    if missing:
        raise UsageError(f"{file} has no {missing[0]}: run 'make data' to count the shards again")
    return [counts[Path(path).name] for path in paths]


def download(settings: Settings) -> None:
    """Log which images were found, and count those in shards. Nothing is downloaded.

    The command `download` calls this, never a rank.

    Raises:
        UsageError: there are no images, or a shard can't be read.
    """
    folder = Path(settings.data_dir)
    if settings.dataset == "synthetic":
        log.info(
            "synthetic images need no file; put your own into %s/train and %s/validation, and "
            "train with --dataset files, tar or parquet",
            folder,
            folder,
        )
    elif settings.dataset == "files":
        images = find(folder / "train", settings)
        log.info("%s has %d images to train on", folder, len(images))
    else:
        kind, paths = SHARDS[settings.dataset], shards(folder / "train", settings.dataset)
        counts = {Path(path).name: len(kind([path])) for path in paths}
        file = sizes_file(settings)
        try:
            write_atomically(file, json.dumps(counts, indent=1) + "\n")
        except OSError as error:
            raise UsageError(
                f"can't write {file}: {error.strerror}; without this file, a resumed run reads the "
                f"beginning of the epoch again: ask its owner to run this command"
            ) from None
        log.info("%d images in %d shards: %s", sum(counts.values()), len(counts), file)
    for part in ("validation", "test"):
        if settings.dataset != "synthetic" and (folder / part).is_dir():
            log.info("%s has %d images", folder / part, len(find(folder / part, settings)))
