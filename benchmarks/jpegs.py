"""JPEG images in the three layouts of docs/large-data.md."""

import io
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import numpy as np

EDGE, CLASSES, SHARDS = 256, 10, 16


def jpeg(draw: np.random.Generator) -> bytes:
    """Return an image of some 29 kB, as photographs of this size have."""
    from PIL import Image

    blobs = Image.fromarray(draw.integers(0, 256, (24, 24, 3), np.uint8))
    smooth = np.asarray(blobs.resize((EDGE, EDGE), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = smooth + draw.integers(-20, 21, (EDGE, EDGE, 1), np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


@cache
def written(images: int) -> Path:
    """Return a folder with so many training images in each layout, and some to evaluate on."""
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet  # type: ignore[import-untyped]

    folder = Path(tempfile.mkdtemp(prefix="jpegs-"))
    draw = np.random.default_rng(0)
    for part in ("validation", "test"):
        _write_file(folder / part, 0, 0, jpeg(draw))
    for shard in range(SHARDS):
        rows = [(jpeg(draw), int(draw.integers(CLASSES))) for _ in range(images // SHARDS)]
        with tarfile.open(folder / f"train-{shard}", "w") as archive:
            for number, (content, label) in enumerate(rows):
                _write_file(folder / "train", label, shard * images + number, content)
                for ending, value in (("cls", str(label).encode()), ("jpg", content)):
                    member = tarfile.TarInfo(f"{number:08}.{ending}")
                    member.size = len(value)
                    archive.addfile(member, io.BytesIO(value))
        (folder / f"train-{shard}").rename(folder / f"train/{shard:04}.tar")
        columns = {
            "image": [{"bytes": content, "path": None} for content, _ in rows],
            "label": [label for _, label in rows],
        }
        table = pyarrow.table(columns)
        parquet.write_table(table, folder / f"train/{shard:04}.parquet", row_group_size=100)
    return folder


def _write_file(folder: Path, label: int, number: int, content: bytes) -> None:
    path = folder / str(label) / f"{number:08}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
