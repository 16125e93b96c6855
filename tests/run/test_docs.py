"""What README.md and docs/own-model.md tell to do is done."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import yaml
from renderer import TEMPLATE, copy_template

from .conftest import PATIENCE, clean_environment, srun

# A Python whose environments borrow the tests' packages, pip among them, to save the downloads.
PYTHON = """#!/bin/bash
[[ "$1 $2" == "-m venv" ]] || exec {python} "$@"
{python} -m venv --without-pip "$3" && ln -s {scripts}/copier "$3/bin/" &&
    printf '%s\\n' {packages} >"$(echo "$3"/lib/python3*/site-packages)/borrowed.pth"
"""
BLOCK = re.compile(r"^```(?:python|yaml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_demo(tmp_path: Path) -> None:
    """`make demo`, on few digits."""
    root = copy_template(tmp_path / "template")
    shutil.copy(TEMPLATE / "Makefile", root)
    shutil.copytree(TEMPLATE / "scripts", root / "scripts")
    digits = tmp_path / "digits"
    digits.mkdir()
    draw = np.random.default_rng(0)
    for part, count in (("train", 5_640), ("t10k", 50)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            head = np.array([0x800 + len(shape), *shape], ">u4").tobytes()
            values = draw.integers(0, 10, shape, np.uint8).tobytes()
            (digits / f"{part}-{kind}-ubyte").write_bytes(head + values)
    python = tmp_path / "python3"
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    scripts = sysconfig.get_path("scripts")
    facts = {"python": sys.executable, "packages": " ".join(packages), "scripts": scripts}
    python.write_text(PYTHON.format(**facts))
    python.chmod(0o755)
    # The flags of a make that runs the tests would go before these variables.
    env = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    done = subprocess.run(
        ["make", "demo"],
        cwd=root,
        env={**env, "PYTHON3": str(python), "MNIST_DIR": str(digits)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"Test accuracy: .*ranks: 2, device: cpu, data: MNIST, from", done.stdout)
    assert (root / ".demo/project/README.md").is_file()


@pytest.fixture(scope="module")
def cifar(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project into which all blocks of the page on one's own model are put, as it says."""
    root = tmp_path_factory.mktemp("own") / "demo"
    shutil.copytree(project, root)
    text = (TEMPLATE / "docs/own-model.md").read_text("utf-8")
    blocks = {name.replace("<package>", "demo"): block for name, block in BLOCK.findall(text)}
    for name in ("data.py", "model.py"):
        (root / "src/demo" / name).write_text(blocks.pop(f"src/demo/{name}").lstrip())
    insert(root / "src/demo/config.py", "validation_size", blocks.pop("src/demo/config.py"))
    replace(root / "src/demo/figures.py", "axes.imshow(image[0]", blocks.pop("src/demo/figures.py"))
    settings = root / "configs/train.yaml"
    block = blocks.pop("configs/train.yaml")
    settings.write_text(
        yaml.safe_dump(yaml.safe_load(settings.read_text()) | yaml.safe_load(block))
    )
    assert not blocks, "a block of a file that nothing is done with"
    return root


def insert(path: Path, field: str, block: str) -> None:
    """Put a field behind another and its description."""
    lines = path.read_text().splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if line.startswith(f"    {field}:"))
    path.write_text("".join([*lines[: at + 2], block, *lines[at + 2 :]]))


def replace(path: Path, start: str, block: str) -> None:
    """Put a block in the place of the one line that begins with something."""
    lines = path.read_text().splitlines(keepends=True)
    (at,) = (number for number, line in enumerate(lines) if line.lstrip().startswith(start))
    path.write_text("".join([*lines[:at], block, *lines[at + 1 :]]))


def test_another_model_and_dataset_train(cifar: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    draw = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        labels = draw.integers(0, 10, 400)
        pixels = draw.integers(0, 128, (400, 3, 1024), np.uint8)
        for picture, label in zip(pixels, labels, strict=True):
            picture[label % 3, 96 * label : 96 * label + 128] += 127
        records = np.concatenate([labels[:, None].astype(np.uint8), pixels.reshape(400, -1)], 1)
        records.tofile(data / f"{name}.bin")
    flags = ("--dataset=cifar10", "--validation-size=400", "--batch-size=32", "--max-steps=80")
    job = srun(cifar, tmp_path / "run", 2, f"--data-dir={data}", *flags)
    assert job.wait().summary["test_accuracy"] > 0.5, job.log
    assert "figures.py failed" not in job.log
    assert yaml.safe_load((tmp_path / "run/config.yaml").read_text())["augment"] is True
    missing = srun(cifar, tmp_path / "other", 1, f"--data-dir={tmp_path}", *flags).wait()
    assert missing.codes == [1] and "has no data_batch_1.bin" in missing.log


@pytest.mark.parametrize(
    "command",
    [["pytest", "-q", "tests/test_yours.py", "tests/test_train.py"], ["ruff", "check", "."]],
)
def test_its_own_tests_and_linters_pass(cifar: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=cifar,
        env=clean_environment(cifar),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr


NAMED_DATA = """

class Named(Digits):
    def __getitems__(self, indices):
        images, labels = super().__getitems__(indices)
        return {"picture": images, "more": (labels, "a note")}, labels


def load(settings, plain=load):
    sets = plain(settings)
    sets = (sets.train, sets.validation, sets.test)
    return Datasets(*(Named(each.images, each.labels) for each in sets))
"""
NAMED_MODEL = """

class FromNames(Network):
    def forward(self, inputs):
        assert inputs["more"][0].shape == (len(inputs["picture"]),)
        return super().forward(inputs["picture"])


def build():
    return FromNames()
"""


def test_inputs_may_be_dictionaries_of_tensors(project: Path, tmp_path: Path) -> None:
    named = tmp_path / "demo"
    shutil.copytree(project, named)
    for name, text in (("data.py", NAMED_DATA), ("model.py", NAMED_MODEL)):
        with (named / "src/demo" / name).open("a") as file:
            file.write(text)
    jobs = [srun(each, tmp_path / f"run{each.parent.name}", 2) for each in (named, project)]
    first, second = (job.wait().summary["parameters_sha256"] for job in jobs)
    assert first == second
