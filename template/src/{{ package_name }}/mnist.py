"""Reads and downloads the files of MNIST, and draws synthetic digits, which need no file.

Only data.py uses this module. Delete it when you replace the example.
"""

import gzip
import hashlib
import http.client
import io
import logging
import urllib.request
import zlib
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .engine import UsageError, write_atomically

log = logging.getLogger(__name__)

URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MOST_BYTES = 2**28  # upper limit of an unpacked file; MNIST's largest file is smaller than 2**26
# SHA-256 of the unpacked files.
CHECKSUMS = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}


def read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return images, uint8 (samples, 28, 28), and labels, int64 (samples,).

    Args:
        folder: where the files are.
        part: "train" or "t10k" (test).

    Raises:
        UsageError: a file is missing or damaged.
    """
    images = read_idx(folder / f"{part}-images-idx3-ubyte")
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte")
    return torch.from_numpy(images), torch.from_numpy(labels).long()


def read_idx(path: Path) -> np.ndarray:
    """Return the array in an IDX file of bytes, read from `path` or from `path`.gz.

    The format is: two zero bytes, one byte for the type, one byte for the number of dimensions,
    their sizes as big-endian 32-bit integers, and the values.

    Raises:
        UsageError: the file is missing or damaged.
    """
    found = stored(path)
    if not found.is_file():  # a named pipe would block when it is opened
        raise UsageError(
            f"no {path.name}[.gz] in {path.parent.resolve()}: run 'make data' where there is "
            "internet, point --data-dir at the files, or use --dataset synthetic"
        )
    try:
        with found.open("rb") as file:
            content = unpacked(file.read(MOST_BYTES + 1))
        shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
        return np.frombuffer(content, np.uint8, offset=4 + shape.nbytes).reshape(shape).copy()
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise UsageError(f"{found} is damaged ({error}): delete it and run 'make data'") from None


def stored(path: Path) -> Path:
    """Return `path` if that file exists, else `path`.gz."""
    return path if path.exists() else path.with_name(path.name + ".gz")


def unpacked(content: bytes) -> bytes:
    """Return the content of a file, decompressed if it is in gzip's format.

    Raises:
        ValueError: it has more than MOST_BYTES after decompression.
    """
    if content.startswith(b"\x1f\x8b"):
        content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return content


def download(folder: Path, url: str = URL) -> None:
    """Download the files of MNIST that are not in `folder` yet, and verify their checksums.

    Raises:
        UsageError: a file can't be downloaded or written, or its checksum is wrong.
    """
    for name, checksum in CHECKSUMS.items():
        if stored(folder / name).exists():
            log.info("%s is already there", name)
            continue
        try:
            with urllib.request.urlopen(f"{url}{name}.gz", timeout=30) as response:
                content = response.read()
            if hashlib.sha256(unpacked(content)).hexdigest() != checksum:
                raise ValueError("its checksum is wrong")
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / f"{name}.gz", content)
        except (OSError, EOFError, ValueError, zlib.error, http.client.HTTPException) as error:
            raise UsageError(
                f"can't fetch {url}{name}.gz to {folder} ({str(error)[:200]!a}): copy MNIST's four "
                "files there from elsewhere, or use --dataset synthetic"
            ) from None


# Pictures of the digits, 7 rows by 5 columns. A number is a row, and each of its bits is a pixel.
GLYPHS = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 6, 8, 16, 31),
    (30, 1, 1, 14, 1, 1, 30),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)


def synthesize(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return synthetic digits: the pictures of `GLYPHS`, shifted, faded and with noise.

    Images are uint8 (samples, 28, 28), labels are int64 (samples,), as in MNIST. The same seed
    gives the same digits on every rank.
    """
    draw = np.random.default_rng(seed)
    rows = np.array(GLYPHS, np.uint8)[:, :, None]
    glyphs = (rows >> np.arange(4, -1, -1, dtype=np.uint8)) & 1
    glyphs = glyphs.repeat(3, axis=1).repeat(3, axis=2)  # (10, 21, 15)
    labels = draw.integers(0, 10, samples)
    images = draw.integers(0, 64, (samples, 28, 28), np.uint8)
    tops, lefts = draw.integers(0, 8, samples), draw.integers(0, 14, samples)
    inks = draw.integers(60, 192, samples, np.uint8)
    shifted = np.zeros((10, 8, 14, 28, 28), np.uint8)
    for top, left in product(range(8), range(14)):
        shifted[:, top, left, top : top + 21, left : left + 15] = glyphs
    images += inks[:, None, None] * shifted[labels, tops, lefts]
    return torch.from_numpy(images), torch.from_numpy(labels)
