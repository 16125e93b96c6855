"""The examples that a project can start with, except digits, which all other tests train."""

import gzip
import io
import json
import math
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pytest
import torch
from metrics import reproducible
from pages import put_hook
from PIL import Image
from pyarrow import parquet  # type: ignore[import-untyped]
from renderer import render_project

from benchmarks import jpegs

from .conftest import QUICK, Job, clean_environment, python, spawn, tasks


@dataclass
class Example:
    """A project that starts with an example.

    Attributes:
        name: of the example; the project's package is called my_<name>.
        flags: make it small.
        samples: of its test set.
    """

    name: str
    flags: tuple[str, ...]
    samples: int
    project: Path

    def start(self, ranks: int, run_dir: Path, command: str, *flags: str) -> Job:
        """Start a command on some ranks."""
        return spawn(
            self.project, run_dir, [[f"my_{self.name}", command, *flags]] * ranks, tasks(ranks)
        )

    def train(self, ranks: int, run_dir: Path, *flags: str) -> Job:
        """Start a training on some ranks."""
        own = (f"--run-dir={run_dir}", *QUICK, "--max-steps=100", "--log-every=1", *self.flags)
        return self.start(ranks, run_dir, "train", *own, *flags)

    def module(self, name: str) -> Any:  # noqa: ANN401
        """Return a module of its package."""
        return import_module(f"my_{self.name}.{name}")


TEXT = ("--layers=2", "--heads=2", "--width=32", "--context=16", "--batch-size=16", "--dropout=0.1")
TEXT += ("--held-out=0.01", "--validate-every=40", "--ema=0.9", "--lr=0.01")
TABLE = ("--layers=2", "--width=32", "--batch-size=32", "--dropout=0.1")
IMAGES = ("--size=24", "--width=8", "--layers", "1", "1", "--batch-size=32", "--lr=0.4")
EXAMPLES = {"text": (TEXT, 624), "table": (TABLE, 2000), "images": (IMAGES, 1001)}


def make_example(folder: Path, name: str) -> Example:
    """Render the project of an example, whose package can be imported from then on."""
    project = render_project(folder / name, package_name=f"my_{name}", example=name)
    sys.path.append(str(project / "src"))
    return Example(name, *EXAMPLES[name], project)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return make_example(tmp_path_factory.mktemp("example"), "text")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return make_example(tmp_path_factory.mktemp("example"), "table")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return make_example(tmp_path_factory.mktemp("example"), "images")


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Example:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_it_stops_and_goes_on_bit_for_bit_learns_and_predicts(
    example: Example, tmp_path: Path, ranks: int
) -> None:
    whole = example.train(ranks, tmp_path / "whole").wait()
    stopped = example.train(ranks, tmp_path / "run")
    stopped.wait_for_step(20)
    stopped.processes[-1].send_signal(signal.SIGUSR2)
    assert stopped.wait().codes == [75] * ranks, stopped.log
    resumed = example.train(ranks, tmp_path / "run").wait()
    assert 20 <= resumed.summary["resumed_from_step"] < 100
    assert resumed.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert reproducible(resumed.metrics()) == reproducible(whole.metrics())
    assert "figures.py failed" not in whole.log

    summary = resumed.summary
    flags = (str(tmp_path / "run"), "--checkpoint=latest", "--device=cpu")
    predict = example.start(ranks, tmp_path / "predict", "predict", *flags).wait()
    assert set(predict.codes) == {0}, predict.log
    lines = (tmp_path / "run" / "predictions-test.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == example.samples
    if example.name == "text":
        # Of a text of which it knows only how frequent each letter is: 17.
        assert summary["test_perplexity"] < 12
        mean = sum(math.log(line["perplexity"]) for line in found) / len(found)
        assert math.exp(mean) == pytest.approx(summary["test_perplexity"], rel=1e-4)
    elif example.name == "images":
        # By guessing: 0.1.
        assert summary["test_accuracy"] > 0.5
        right = sum(line["class"] == number % 10 for number, line in enumerate(found))
        assert right / len(found) == pytest.approx(summary["test_accuracy"])
    else:
        # Of the mean of all targets: 0.
        assert summary["test_r2"] > 0.5
        targets = example.module("data").load(example.module("settings").Settings()).test.targets
        errors = [abs(line["y"] - float(y)) for line, y in zip(found, targets, strict=True)]
        assert sum(errors) / len(errors) == pytest.approx(summary["test_mae"], rel=1e-4)
    if ranks == 2:
        return
    # New data: the first ten samples of the test set, as files.
    path = new_files(example, tmp_path)
    predict = example.start(1, tmp_path / "new", "predict", *flags, f"--input={path}").wait()
    assert predict.codes == [0], predict.log
    lines = (tmp_path / "run" / f"predictions-{path.stem}.jsonl").read_text().splitlines()
    again = [json.loads(line) for line in lines]
    if example.name == "images":
        assert [each["name"] for each in again] == [f"{number}.png" for number in range(10)]
        again = [each["prediction"]["class"] for each in again]  # of images that are cut again
        found = [each["class"] for each in found]
    assert again == [
        {k: pytest.approx(v, rel=1e-4) if k != "next" else v for k, v in each.items()}
        if isinstance(each, dict)
        else each
        for each in found[:10]
    ]


def new_files(example: Example, folder: Path) -> Path:
    """Write the first ten samples of an example's test set as a user would have them."""
    test = example.module("data").load(settings_of(example)).test
    if example.name == "text":
        path = folder / "new.txt"
        path.write_bytes(test.text[: 10 * test.context + 1].tobytes())
    elif example.name == "table":
        path = folder / "new.csv"
        np.savetxt(path, test.rows[:10], "%.9g", ",", header="x1,x2,x3,x4,x5,x6,x7,x8", comments="")
    else:
        path = folder / "new"
        path.mkdir()
        (path / "notes.txt").touch()
        for number in range(10):
            Image.fromarray(test[number][0].numpy()).save(path / f"{number}.png")
    return path


def settings_of(example: Example) -> Any:  # noqa: ANN401
    """Return the settings with which an example is trained here."""
    return example.module("settings").Settings.parse([*QUICK, *example.flags])


def test_the_hook_of_the_guide_logs_at_each_evaluation(example: Example, tmp_path: Path) -> None:
    hooked = replace(example, project=put_hook(shutil.copytree(example.project, tmp_path / "demo")))
    job = hooked.train(2, tmp_path / "run", "--max-steps=4", "--validate-every=2").wait()
    assert job.codes == [0, 0], job.log
    what, kind = ("text", "txt") if example.name == "text" else ("first", "png")
    logged = {path.name for path in (tmp_path / "run/figures").glob(f"*-{what}-*.{kind}")}
    expected = (("validation", 2), ("validation", 4), ("test", 4))
    assert logged == {f"{split}-{what}-{step:08}.{kind}" for split, step in expected}
    if example.name == "text":
        text = (tmp_path / "run/figures/test-text-00000004.txt").read_text()
        assert text.startswith("the old king ")


@pytest.mark.parametrize(
    "example",
    ["text", *(pytest.param(name, marks=pytest.mark.slow) for name in ("table", "images"))],
    indirect=True,
)
def test_its_own_linter_and_test_of_learning_pass(example: Example) -> None:
    for command in (
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["pytest", "-q", "tests/test_learns.py"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=example.project,
            env=clean_environment(example.project),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout


Load = Callable[..., Any]


def loader(example: Example, dataset: str, folder: Path) -> Load:
    """Return a function that loads a dataset from a folder."""
    settings = example.module("settings").Settings

    def load(**values: object) -> Any:  # noqa: ANN401
        return example.module("data").load(
            settings(dataset=dataset, data_dir=str(folder), **values)
        )

    return load


def test_a_text_of_ones_own_is_read(text: Example, tmp_path: Path) -> None:
    load = loader(text, "text", tmp_path)
    error = text.module("engine.errors").UsageError
    with pytest.raises(error, match="no text in"):
        load()
    (tmp_path / "2.txt").write_bytes(b"world" * 100)
    (tmp_path / "1.txt").write_bytes(b"hello" * 100)
    with pytest.raises(error, match="1000 bytes, too few"):
        load()
    found = load(context=10, held_out=0.2)
    assert [len(part) for part in (found.train, found.validation, found.test)] == [59, 19, 19]
    tokens, following = found.train.__getitems__([0, 49])
    decode = text.module("data").decode
    assert [decode(row) for row in tokens] == ["hellohello", "hellohello"]
    assert [decode(row) for row in following] == ["ellohelloh", "ellohellow"]


def test_a_table_of_ones_own_is_read(table: Example, tmp_path: Path) -> None:
    load = loader(table, "csv", tmp_path)
    error = table.module("engine.errors").UsageError
    names = {"columns": ("b", "a"), "target": "price"}
    with pytest.raises(error, match=r"no table\.csv"):
        load(**names)
    path = tmp_path / "table.csv"
    rows = [f'{number},"{number}.5",,{number}e1\n' for number in range(10)]
    path.write_text("".join(["a,b,name,price\n", *rows]))
    with pytest.raises(error, match="no column 'x1'"):
        load()
    found = load(**names)
    assert [len(part) for part in (found.train, found.validation, found.test)] == [8, 1, 1]
    assert torch.equal(load(**names, seed=1).test.targets, found.test.targets)
    row, target = found.train[0]
    assert row.tolist() == [row[1] + 0.5, row[1]] and target == row[1] * 10
    for bad in ("1,2,,three\n", "1,2,,nan\n", "1,2\n", '"1",2,,3,4\n'):
        path.write_text("".join(["a,b,name,price\n", *rows, bad]))
        with pytest.raises(error, match=r"row (10|11)"):
            load(**names)
    path.write_text("".join(["a,b,name,price\n", *(row.replace("\n", ",\n") for row in rows)]))
    assert len(load(**names).train) == 8, "a comma at the end of a row is no value"
    text = "of two lines\n" + "and long, " * 50_000
    path.write_text(f'a,b,name,price\n{"".join(rows)}1,2,"{text}",3\n')
    assert len(load(**names).train) == 9, "another column may have any text"
    with pytest.raises(error, match="two columns"):
        load(columns=("a", "price"), target="price")


def test_images_of_ones_own_are_read(images: Example, tmp_path: Path) -> None:
    files, tar, rows = (loader(images, kind, tmp_path) for kind in ("files", "tar", "parquet"))
    error = images.module("engine.errors").UsageError
    for load, ending in ((tar, "tar"), (rows, "parquet")):
        with pytest.raises(error, match=rf"no \.{ending} file"):
            load()
    with pytest.raises(error, match="no image in"):
        files()
    jpegs.write(tmp_path, shards=2, each=12, edge=40)
    with pytest.raises(error, match="has 10 folders"):
        files(classes=9)
    for load in (files, tar, rows):
        found = load(size=24)
        assert len(found.validation) == len(found.test) == 10
        pixels, label = found.validation[7]
        assert (pixels.shape, pixels.dtype, label) == ((24, 24, 3), torch.uint8, 7)
        for held_out in (found.validation, found.test):  # without augmentation
            assert torch.equal(held_out[7][0], held_out[7][0])
    with pytest.raises(error, match="group 0, row 7"):
        rows(classes=7).validation[7]
    # Classes are numbered as in the training set, also where some are missing.
    (tmp_path / "validation/0").rename(tmp_path / "validation/.hidden")
    assert sorted(label for _, label in files().validation) == list(range(1, 10))
    (tmp_path / "validation/.hidden").rename(tmp_path / "validation/zero")
    with pytest.raises(error, match="class zero"):
        files()
    (tmp_path / "validation/zero").rename(tmp_path / "validation/0")
    # Without a test set, that of the validation is taken.
    shutil.rmtree(tmp_path / "test")
    assert len(files().test) == 10
    (tmp_path / "train/0002.parquet").touch()
    with pytest.raises(error, match=r"no 0002\.parquet"):
        rows()
    (tmp_path / "train/._0000.tar").write_bytes(b"of macOS")
    tar()
    for damaged in ("", "3", '{"0000.tar": null}'):
        (tmp_path / "tar-sizes.json").write_text(damaged)
        with pytest.raises(error, match=r"tar-sizes\.json is damaged"):
            tar()


def test_a_damaged_image_or_shard_is_named(images: Example, tmp_path: Path) -> None:
    error = images.module("engine.errors").UsageError
    kinds, transforms = images.module("files").SHARDS, images.module("transforms")
    content = jpegs.jpeg(np.random.default_rng(0), 40)
    sample = images.module("files").Sample
    for bad, said in ((b"no", "is not a readable image"), (content[:-200], "is damaged")):
        with pytest.raises(error, match=f"cat {said}.*: remove it"):
            transforms.augment(sample("cat", bad, 0), 24, 0.25)
    path = tmp_path / "0.tar"
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("0001.jpg")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    with pytest.raises(error, match="image 0001 without"):
        list(kinds["tar"].read(str(path)))
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(error, match=r"can't read .*/0\.tar"):
        kinds["tar"]([str(path)])
    path.write_bytes(b"no Parquet")
    for use in (kinds["parquet"].read, lambda name: kinds["parquet"]([name])):
        with pytest.raises(error, match=r"can't read .*0\.tar"):
            list(use(str(path)))
    for columns in ({"image": [content]}, {"image": [content], "label": ["cat"]}):
        parquet.write_table(pyarrow.table(columns), path)
        with pytest.raises(error, match="image and label"):
            list(kinds["parquet"].read(str(path)))


def test_a_large_jpeg_is_decoded_at_a_part_of_its_size(images: Example) -> None:
    """The result differs little from that of the whole; the middle is seven eighths of it."""
    transforms, sample = images.module("transforms"), images.module("files").Sample
    content = jpegs.jpeg(np.random.default_rng(0), 512)
    pixels = transforms.center(sample("", content, 0), 48)
    whole = Image.open(io.BytesIO(content)).convert("RGB")
    expected = whole.resize((48, 48), Image.Resampling.BILINEAR, box=(32, 32, 480, 480))
    difference = np.abs(pixels.numpy().astype(int) - np.asarray(expected))
    assert difference.mean() < 3 and difference.max() > 0


STEP = """
import torch
from my_images.model import ResNet
from my_images.settings import Settings

network = ResNet(Settings(width=8, layers=(1, 1)))
for _ in range(2):
    network(torch.zeros(8, 224, 224, 3, dtype=torch.uint8)).sum().backward()
"""


def test_few_channels_of_large_images_train(images: Example) -> None:
    """PyTorch 2.13 crashes there in a convolution of 1 by 1 with a stride."""
    python(images.project, STEP)
