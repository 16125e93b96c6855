"""Stored images: files in a folder for each class, tar shards or Parquet shards.

The layouts are those of torchvision's `ImageFolder` (`CLASS/NAME.jpg`), of WebDataset (`*.tar`, in
which `KEY.jpg` and `KEY.cls` are neighbours) and of Hugging Face's `datasets` (`*.parquet` with the
columns `image` and `label`). Each can be read by index. Shards can also be read from front to back,
which is the fastest way to read on the file systems of clusters. What is not taken is logged.
"""

import logging
import os
import tarfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count, islice
from operator import index as as_integer
from pathlib import Path
from typing import NamedTuple, Protocol

from .engine import UsageError

log = logging.getLogger(__name__)

ENDINGS = ("jpg", "jpeg", "png", "webp", "bmp", "pgm", "ppm", "tif", "tiff")


class Sample(NamedTuple):
    """A stored image (`content`) and its class. `name` says where it is stored, for messages."""

    name: str
    content: bytes
    label: int


class Images(Protocol):
    """Stored images that are read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


def say_left_out(others: Sequence[str]) -> None:
    """Log how many files of a data set were not taken."""
    if others:
        log.info("%d not taken, such as %s", len(others), others[0])


@contextmanager
def _errors_explained() -> Iterator[None]:
    """Turn errors of reading into a UsageError with the path."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"can't read {error.filename}: {error.strerror}") from None


class Files:
    """Images as files, with a folder for each class.

    Args:
        folder: the folder that has the classes' folders.
        classes: names of the classes' folders, in the order of the classes' numbers. A folder may
            be missing.
    """

    def __init__(self, folder: Path, classes: Sequence[str]) -> None:
        numbers = {name: label for label, name in enumerate(classes)}
        others = [str(path) for path in folder.glob("*") if path.name not in numbers]
        self.places = []
        for name, label in numbers.items():
            with _errors_explained():
                entries = os.scandir(folder / name) if (folder / name).is_dir() else ()
                for file in sorted(entries, key=lambda entry: entry.name):
                    if _is_image(file.name) and file.is_file():
                        self.places.append((file.path, label))
                    else:
                        others.append(file.path)
        say_left_out(others)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Sample:
        path, label = self.places[index]
        with _errors_explained():
            return Sample(path, Path(path).read_bytes(), label)


class Tar:
    """Images in tar shards. At the start, it reads all headers to find where the images are.

    Raises:
        UsageError: a shard can't be read, has no image, or has an image without a class.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        others: list[str] = []
        self.places = [
            (path, image.offset_data, image.size, label)
            for path in paths
            for _, image, label in _members(path, others)
        ]
        say_left_out(others)
        _require(self.places, paths)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Sample:
        path, offset, size, label = self.places[index]
        with open(path, "rb") as file:
            file.seek(offset)
            return Sample(f"{path}, byte {offset}", file.read(size), label)

    @staticmethod
    def read(path: str) -> Iterator[Sample]:
        """Yield the images of a shard, from front to back."""
        for archive, image, label in _members(path, []):
            yield Sample(f"{path}, {image.name}", _content(archive, image), label)


class Parquet:
    """Images in Parquet shards. It reads whole row groups, and keeps the last one in memory.

    Raises:
        UsageError: a shard can't be read, has no image, or lacks one of the columns.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.groups = [
            (path, group, rows) for path in paths for group, rows in enumerate(_group_sizes(path))
        ]
        self.firsts = [0, *accumulate(rows for _, _, rows in self.groups)]
        self.kept: tuple[int, list[Sample]] = (-1, [])
        _require(list(islice(_rows(paths[0]), 1)), paths)  # it reads the columns, too

    def __len__(self) -> int:
        return self.firsts[-1]

    def __getitem__(self, index: int) -> Sample:
        number = bisect_right(self.firsts, index) - 1
        if self.kept[0] != number:
            path, group, _ = self.groups[number]
            self.kept = (number, list(_rows(path, group)))
        return self.kept[1][index - self.firsts[number]]

    @staticmethod
    def read(path: str) -> Iterator[Sample]:
        """Yield the images of a shard, from front to back."""
        return _rows(path)


SHARDS: dict[str, type[Tar] | type[Parquet]] = {"tar": Tar, "parquet": Parquet}


def _require(samples: Sequence[object], paths: Sequence[str]) -> None:
    if not samples:
        raise UsageError(f"no image in {paths[0]}: remove it, or store images as the module says")


def _is_image(name: str) -> bool:
    """Return whether the name of a file is that of an image. macOS adds files named `._NAME`."""
    return name[:1] != "." and name.rpartition(".")[2].lower() in ENDINGS


def _members(
    path: str, others: list[str]
) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo, int]]:
    """Yield the images of a tar shard, and their classes; add what is not taken to `others`."""
    try:
        with tarfile.open(path, "r:") as archive:  # uncompressed, to read by offset
            for key, parts in _groups(archive, path, others):
                image = next((parts[each] for each in ENDINGS if each in parts), None)
                if image and image.issparse():  # its bytes are not where its offset says
                    raise UsageError(f"{path} has a sparse file {image.name}: make it without -S")
                if image and "cls" not in parts:
                    raise UsageError(f"{path} has an image {key} without its class, {key}.cls")
                others += (
                    f"{path}, {member.name}"
                    for member in parts.values()
                    if member is not image and (not image or _is_image(Path(member.name).name))
                )
                if image:
                    yield archive, image, int(_content(archive, parts["cls"]))
            assert archive.fileobj  # it is open
            archive.fileobj.seek(archive.offset)
            end = archive.fileobj.read(2**20)  # tarfile itself stops at any end without a word
            if not end or end.strip(b"\0"):
                raise tarfile.ReadError("it was cut off, or other files were added to its end")
    except (tarfile.TarError, ValueError, OSError) as error:
        raise UsageError(f"can't read {path}: {error}") from None


def _groups(
    archive: tarfile.TarFile, path: str, others: list[str]
) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yield each key of a tar shard with its neighbouring files by ending."""
    key, parts = "", dict[str, tarfile.TarInfo]()
    for member in archive:
        stem, ending = _split(member.name)
        if member.isfile() and stem.rpartition("/")[2]:  # hidden files have no stem
            if stem != key or ending in parts:
                yield key, parts
                key, parts = stem, {}
            parts[ending] = member
        elif not member.isdir():
            others.append(f"{path}, {member.name}")
    yield key, parts


def _split(name: str) -> tuple[str, str]:
    """Return a name without its extension, and the extension in lower case.

    The extension is everything after the first dot of the file's name, as in WebDataset.
    """
    folder, slash, last = name.rpartition("/")
    stem, _, ending = last.partition(".")
    return folder + slash + stem, ending.lower()


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file  # it is None only for members that are not regular files
    return file.read()


def _group_sizes(path: str) -> list[int]:
    """Return the number of rows in each row group of a Parquet shard."""
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

    try:
        metadata = parquet.read_metadata(path)
    except (ArrowException, OSError) as error:
        raise UsageError(f"can't read {path}: {error}") from None
    return [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]


def _rows(path: str, group: int | None = None) -> Iterator[Sample]:
    """Yield the images of a Parquet shard, or of one of its row groups."""
    from pyarrow import ArrowException, parquet, types

    try:
        file = parquet.ParquetFile(path)
        groups, where = (None, path) if group is None else ([group], f"{path}, group {group}")
        number = count()
        for rows in file.iter_batches(64, groups, columns=["image", "label"]):
            images = rows["image"]
            if types.is_struct(images.type):
                images = images.field("bytes")
            for image, label in zip(images, rows["label"], strict=True):
                name, content = f"{where}, row {next(number)}", image.as_py()
                if not isinstance(content, bytes):
                    raise UsageError(f"{name} has no bytes: store the image itself, not its path")
                yield Sample(name, content, as_integer(label.as_py()))
    except (ArrowException, AttributeError, KeyError, OSError, TypeError) as error:
        raise UsageError(f"can't read the columns image and label of {path}: {error}") from None
