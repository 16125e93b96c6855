"""The example `images` keeps what it reads as it is, and names what it does not read."""

import io
import re
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from renderer import render_project

from .conftest import command, python

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
    said = python(project, SHOW, *(folder / name for name in files))
    return dict(zip(files, said.splitlines(), strict=True))


def test_images_of_more_than_8_bits_keep_their_range(images: Path, tmp_path: Path) -> None:
    wide = patches(65535)
    black_is_zero, white_is_zero = (struct.pack("<HHIH", 262, 3, 1, value) for value in (1, 0))
    files = {
        "white.tiff": encoded(65535 - wide, "TIFF").replace(black_is_zero, white_is_zero),
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


def test_images_are_turned_or_refused_as_they_say(images: Path, tmp_path: Path) -> None:
    refused = {
        "float.tiff": encoded(patches(255).astype(np.float32), "TIFF"),
        "long.tiff": encoded(patches(65535).astype(np.int32), "TIFF"),
    }
    with Image.open(io.BytesIO(encoded(patches(255).astype(np.uint8).T, "PNG"))) as grey:
        exif = grey.getexif()
        exif[0x112] = 5  # its rows are columns
        turned = io.BytesIO()
        grey.save(turned, "PNG", exif=exif)
    plain = encoded(patches(255).astype(np.uint8), "JPEG")
    files = {**refused, "turned.png": turned.getvalue(), "cut.ppm": b"P6"}
    for number, junk in enumerate((b"", b"MM\0*", b"II*\0" + bytes(2), b"II*\0\x08\0\0\0\xff")):
        of_it = b"Exif\0\0" + junk
        head = plain[:2] + b"\xff\xe1" + struct.pack(">H", len(of_it) + 2)
        files[f"junk-{number}.jpg"] = head + of_it + plain[2:]
    said = shown(images, tmp_path, files)
    for name in refused:
        assert said[name].startswith(str(tmp_path / name)) and "8 or 16 bits" in said[name]
    assert said["turned.png"] == " ".join(map(str, GREYS))
    assert said["cut.ppm"].startswith(str(tmp_path / "cut.ppm"))
    assert [name for name, line in said.items() if "not a readable" in line] == ["cut.ppm"]


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def make_data(project: Path, folder: Path, kind: str) -> tuple[int, str]:
    """Run what `make data` runs; return its exit code and what it says."""
    done = command(project, "download", f"--dataset={kind}", f"--data-dir={folder}")
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


GREY = encoded(patches(255).astype(np.uint8), "PNG")
TAR = {
    "whole": ([("a.png", GREY), ("a.cls", b"1"), ("b.PNG", GREY), ("b.cls", b"0")], 2, 0),
    "more formats": ([("a.tif", GREY), ("a.cls", b"1"), ("b.ppm", GREY), ("b.cls", b"0")], 2, 0),
    "the same key twice": ([("a.png", GREY), ("a.cls", b"1")] * 4, 4, 0),
    "dots": (
        [("a.png", GREY), ("a.cls", b"1"), ("x.1.png", GREY), ("x.1.cls", b"1")],
        1,
        2,
    ),
    "macOS": ([("._a.png", b"x"), ("a.png", GREY), ("._a.cls", b"x"), ("a.cls", b"1")], 1, 2),
    "no image": ([("a.png", GREY), ("a.cls", b"1"), ("b.gif", GREY), ("b.cls", b"1")], 1, 2),
    "two images": ([("a.png", GREY), ("a.jpg", GREY), ("a.cls", b"1")], 1, 1),
}


@pytest.mark.parametrize("case", TAR)
def test_what_is_not_taken_from_a_tar_file_is_counted_and_named(
    images: Path, tmp_path: Path, case: str
) -> None:
    members, taken, left = TAR[case]
    write_tar(tmp_path / "train/0.tar", members)
    code, said = make_data(images, tmp_path, "tar")
    assert code == 0 and f"{taken} images in 1 shards" in said, said
    assert re.findall(r"(\d+) not taken, .*0\.tar, ", said) == [str(left)] * bool(left)


def test_a_sparse_file_in_a_tar_file_is_refused(images: Path, tmp_path: Path) -> None:
    """By its offset, other bytes would be read."""
    with (tmp_path / "0.ppm").open("wb") as file:
        file.write(b"P6 512 512 255\n")
        file.truncate(15 + 512 * 512 * 3)
    (tmp_path / "0.cls").write_text("0")
    (tmp_path / "data/train").mkdir(parents=True)
    words = ("tar", "--sparse", "-cf", "data/train/0.tar", "0.ppm", "0.cls")
    subprocess.run(words, cwd=tmp_path, check=True)
    code, said = make_data(images, tmp_path / "data", "tar")
    assert code == 1 and "sparse file 0.ppm" in said


def test_links_in_a_tar_file_are_named(images: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "train/0.tar", [("a.png", GREY), ("a.cls", b"1"), ("b.cls", b"1")])
    with tarfile.open(tmp_path / "train/0.tar", "a") as archive:
        link = tarfile.TarInfo("b.png")
        link.type, link.linkname = tarfile.LNKTYPE, "a.png"
        archive.addfile(link)
    code, said = make_data(images, tmp_path, "tar")
    assert code == 0 and "1 images in 1 shards" in said and "2 not taken" in said, said


@pytest.mark.parametrize("fault", ["cut", "joined"])
def test_a_tar_file_without_its_end_or_with_two_is_an_error(
    images: Path, tmp_path: Path, fault: str
) -> None:
    shard = tmp_path / "train/0.tar"
    write_tar(shard, [("a.png", GREY), ("a.cls", b"1"), ("b.png", GREY), ("b.cls", b"0")])
    with tarfile.open(shard) as archive:
        start = archive.getmembers()[2].offset
    whole = shard.read_bytes()
    shard.write_bytes(whole[:start] if fault == "cut" else 2 * whole)
    code, said = make_data(images, tmp_path, "tar")
    assert code == 1 and "0.tar" in said, said
    assert not (tmp_path / "tar-sizes.json").exists()


def test_other_files_beside_shards_are_named(images: Path, tmp_path: Path) -> None:
    write_tar(tmp_path / "train/0.tar", TAR["whole"][0])
    write_tar(tmp_path / "train/more/1.tar", TAR["whole"][0])
    code, said = make_data(images, tmp_path, "tar")
    assert code == 0 and f"taken, such as {tmp_path}/train/more" in said, said


def test_what_is_not_taken_from_folders_is_counted_and_named(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "train/0"
    (folder / "deeper").mkdir(parents=True)
    for name in ("a.png", "b.tif", "deeper/c.png", "._d.png", "e.gif", "../f.png"):
        (folder / name).write_bytes(GREY)
    (folder / "g.png").symlink_to("nothing")
    code, said = make_data(images, tmp_path, "files")
    assert code == 0 and "has 2 images" in said and "5 not taken" in said, said


@pytest.mark.parametrize("kind", ["files", "tar"])
def test_no_sample_at_all_is_an_error(images: Path, tmp_path: Path, kind: str) -> None:
    """Also in the validation set."""
    write_tar(tmp_path / "train/0.tar", TAR["whole"][0])
    (tmp_path / "train/0").mkdir()
    (tmp_path / "train/0/a.png").write_bytes(GREY)
    shutil.copytree(tmp_path / "train", tmp_path / "validation")
    assert make_data(images, tmp_path, kind)[0] == 0
    for part in ("validation", "train"):
        write_tar(tmp_path / part / "0.tar", [("a.gif", GREY), ("a.cls", b"1")])
        (tmp_path / part / "0/a.png").unlink()
        code, said = make_data(images, tmp_path, kind)
        assert code == 1 and f"no image in {tmp_path / part}" in said, said


def write_parquet(path: Path, images: Sequence[object]) -> None:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet  # type: ignore[import-untyped]

    path.parent.mkdir(exist_ok=True)
    parquet.write_table(pyarrow.table({"image": images, "label": [0] * len(images)}), path)


def test_parquet_files_have_the_contents_of_images(images: Path, tmp_path: Path) -> None:
    shard = tmp_path / "train/0.parquet"
    for column in ([GREY, GREY], [{"bytes": GREY, "path": "a.png"}] * 2):
        write_parquet(shard, column)
        code, said = make_data(images, tmp_path, "parquet")
        assert code == 0 and "2 images in 1 shards" in said, said
        read = (
            "from demo.files import Parquet; print(sum(len(x.content) for x in Parquet.read({!r})))"
        )
        assert int(python(images, read.format(str(shard)))) == 2 * len(GREY)
    for column in ([{"bytes": None, "path": "a.png"}], ["a.png"], [None, GREY]):
        write_parquet(shard, column)
        code, said = make_data(images, tmp_path, "parquet")
        assert code == 1 and "0.parquet, row 0" in said, said
    write_parquet(shard, [])
    code, said = make_data(images, tmp_path, "parquet")
    assert code == 1 and "no image in" in said, said


@pytest.mark.parametrize(("example", "kind"), [("table", "csv"), ("text", "text")])
def test_other_data_without_a_sample_is_an_error(tmp_path: Path, example: str, kind: str) -> None:
    root = render_project(tmp_path / "demo", example=example)
    (root / "data").mkdir(exist_ok=True)
    (root / "data/a.txt").touch()
    (root / "data/table.csv").write_text(",".join([*(f"x{n}" for n in range(1, 9)), "y"]) + "\n")
    code, said = make_data(root, root / "data", kind)
    assert code == 1 and "error: " in said, said


def test_text_in_other_files_is_named(tmp_path: Path) -> None:
    root = render_project(tmp_path / "demo", example="text")
    (root / "data").mkdir(exist_ok=True)
    (root / "data/a.txt").write_text("to be or not to be " * 100)
    for name in ("._a.txt", "b.TXT"):
        (root / "data" / name).write_text("no " * 100)
    code, said = make_data(root, root / "data", "text")
    assert code == 0 and "1900" in said and "2 not taken" in said, said
