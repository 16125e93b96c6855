"""Writes JPEG images in the three layouts that the example `images` reads."""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CLASSES = 10


def write(folder: Path, shards: int, each: int, edge: int) -> Path:
    """Write training images in each layout, and some images for validation and test.

    Args:
        folder: where to write. Its folder `train` gets `CLASS/NAME.jpg`, `NUMBER.tar` and
            `NUMBER.parquet`, and `parquet-sizes.json` has the number of images in each Parquet
            file.
        shards: number of shards.
        each: number of images in a shard.
        edge: height and width of an image, in pixels.

    Returns:
        The folder.
    """
    draw = np.random.default_rng(0)
    for part, count, images in (("train", shards, each), ("validation", 1, 10), ("test", 1, 10)):
        for label in range(CLASSES):
            (folder / part / str(label)).mkdir(parents=True)
        for shard in range(count):
            rows = [(jpeg(draw, edge), number % CLASSES) for number in range(images)]
            write_shard(folder / part, shard, rows)
    sizes = {f"{shard:04}.parquet": each for shard in range(shards)}
    (folder / "parquet-sizes.json").write_text(json.dumps(sizes))
    return folder


def write_shard(folder: Path, shard: int, rows: Sequence[tuple[bytes, int]]) -> None:
    """Write images with their classes in each layout."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet  # type: ignore[import-untyped]

    with tarfile.open(folder / f"{shard:04}.tar", "w") as archive:
        for number, (content, label) in enumerate(rows):
            (folder / f"{label}/{shard}-{number}.jpg").write_bytes(content)
            for ending, value in (("cls", str(label).encode()), ("jpg", content)):
                member = tarfile.TarInfo(f"{number:08}.{ending}")
                member.size = len(value)
                archive.addfile(member, io.BytesIO(value))
    columns = {
        "image": [{"bytes": content, "path": None} for content, _ in rows],
        "label": [label for _, label in rows],
    }
    parquet.write_table(pyarrow.table(columns), folder / f"{shard:04}.parquet", row_group_size=100)


def jpeg(draw: np.random.Generator, edge: int) -> bytes:
    """Return an image. With 256 pixels, it has about 29 kB, like photographs of this size."""
    from PIL import Image

    blobs = Image.fromarray(draw.integers(0, 256, (24, 24, 3), np.uint8))
    smooth = np.asarray(blobs.resize((edge, edge), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = smooth + draw.integers(-20, 21, (edge, edge, 1), np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()
