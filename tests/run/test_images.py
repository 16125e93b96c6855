"""The example `images` keeps what it reads as it is, and names what it does not read."""

import io
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from renderer import render_project

from .conftest import clean_environment

GREYS = (0, 64, 128, 255)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the example."""
    return render_project(tmp_path_factory.mktemp("images") / "demo", example="images")


def encoded(pixels: np.ndarray, kind: str) -> bytes:
    """Return pixels as the content of an image file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def tiff_of_12_bits(pixels: np.ndarray) -> bytes:
    """Return a TIFF file as cameras of microscopes write it; Pillow reads it only."""
    height, width = pixels.shape
    bits = "".join(f"{value:012b}" for value in pixels.flat)
    strip = int(bits, 2).to_bytes(len(bits) // 8, "big")
    tags = ((256, width), (257, height), (258, 12), (259, 1), (262, 1), (273, 8), (277, 1))
    tags += ((278, height), (279, len(strip)))
    entries = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags)
    head = b"II*\0" + struct.pack("<I", 8 + len(strip))
    return head + strip + struct.pack("<H", len(tags)) + entries + bytes(4)


def pgm(pixels: np.ndarray, most: int) -> bytes:
    height, width = pixels.shape
    return f"P5 {width} {height} {most}\n".encode() + pixels.astype(">u2").tobytes()


def patches(most: int) -> np.ndarray:
    """Return four grey patches, of 8 pixels each."""
    values = np.array([round(grey * most / 255) for grey in GREYS], np.uint16)
    return values.repeat(8)[None].repeat(32, 0)


SHOW = """
import sys
from pathlib import Path
from demo.engine import UsageError
from demo.files import Sample
from demo.transforms import center

for path in sys.argv[1:]:
    sample = Sample(path, Path(path).read_bytes(), 0)
    try:
        print(*center(sample, 28)[14, [1, 9, 17, 26]].flatten().tolist()[::3])
    except UsageError as error:
        print(error)
"""


def shown(project: Path, folder: Path, files: dict[str, bytes]) -> dict[str, str]:
    """Return the four patches of each image as the network gets them, or the error."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    command = [sys.executable, "-c", SHOW, *(str(folder / name) for name in files)]
    env = clean_environment(project)
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip(files, done.stdout.splitlines(), strict=True))


def test_images_of_more_than_8_bits_keep_their_range(images: Path, tmp_path: Path) -> None:
    wide = patches(65535)
    files = {
        "8.png": encoded(patches(255).astype(np.uint8), "PNG"),
        "16.png": encoded(wide, "PNG"),
        "16.tiff": encoded(wide, "TIFF"),
        "16-big.tiff": encoded(wide.astype(">u2"), "TIFF"),
        "12.tiff": tiff_of_12_bits(patches(4095)),
        "16.pgm": pgm(wide, 65535),
        "12.pgm": pgm(patches(4095), 4095),
    }
    for name, greys in shown(images, tmp_path, files).items():
        assert greys == " ".join(map(str, GREYS)), name


def test_an_image_whose_range_is_unknown_is_refused(images: Path, tmp_path: Path) -> None:
    files = {
        "float.tiff": encoded(patches(255).astype(np.float32), "TIFF"),
        "long.tiff": encoded(patches(65535).astype(np.int32), "TIFF"),
    }
    for name, line in shown(images, tmp_path, files).items():
        assert line.startswith(str(tmp_path / name)) and "8 or 16 bits" in line, line
