"""JPEG images in the three layouts of docs/large-data.md."""

import io
import tarfile
from pathlib import Path

import numpy as np

CLASSES = 10


def write(folder: Path, shards: int, each: int, edge: int) -> Path:
    """Write training images in each layout, and one to validate and to test on.

    Args:
        folder: where to; its `train` gets `CLASS/NAME.jpg`, `NUMBER.tar` and `NUMBER.parquet`.
        shards, each: how many shards, and images in each of them.
        edge: of an image, in pixels.

    Returns:
        The folder.
    """
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet  # type: ignore[import-untyped]

    draw = np.random.default_rng(0)
    for part in ("train", "validation", "test"):
        for label in range(CLASSES if part == "train" else 1):
            (folder / part / str(label)).mkdir(parents=True)
    for part in ("validation", "test"):
        (folder / part / "0/0.jpg").write_bytes(jpeg(draw, edge))
    for shard in range(shards):
        rows = [(jpeg(draw, edge), number % CLASSES) for number in range(each)]
        with tarfile.open(folder / f"train/{shard:04}.tar", "w") as archive:
            for number, (content, label) in enumerate(rows):
                (folder / f"train/{label}/{shard}-{number}.jpg").write_bytes(content)
                for ending, value in (("cls", str(label).encode()), ("jpg", content)):
                    member = tarfile.TarInfo(f"{number:08}.{ending}")
                    member.size = len(value)
                    archive.addfile(member, io.BytesIO(value))
        columns = {
            "image": [{"bytes": content, "path": None} for content, _ in rows],
            "label": [label for _, label in rows],
        }
        table = pyarrow.table(columns)
        parquet.write_table(table, folder / f"train/{shard:04}.parquet", row_group_size=100)
    return folder


def jpeg(draw: np.random.Generator, edge: int) -> bytes:
    """Return an image; with 256 pixels it has some 29 kB, as photographs of this size have."""
    from PIL import Image

    blobs = Image.fromarray(draw.integers(0, 256, (24, 24, 3), np.uint8))
    smooth = np.asarray(blobs.resize((edge, edge), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = smooth + draw.integers(-20, 21, (edge, edge, 1), np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()
