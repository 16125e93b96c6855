"""The examples that a project can start with, besides digits, which all other tests train."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from metrics import reproducible
from renderer import render_project

from .conftest import QUICK, Job, spawn, tasks


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
EXAMPLES = {"text": (TEXT, 624), "table": (TABLE, 2000)}


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
    else:
        # Of the mean of all targets: 0.
        assert summary["test_r2"] > 0.5
        targets = example.module("data").load(example.module("settings").Settings()).test.targets
        errors = [abs(line["y"] - float(y)) for line, y in zip(found, targets, strict=True)]
        assert sum(errors) / len(errors) == pytest.approx(summary["test_mae"], rel=1e-4)


def test_its_own_linter_and_test_of_learning_pass(example: Example) -> None:
    for command in (
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["pytest", "-q", "tests/test_learns.py"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command], cwd=example.project, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


Load = Callable[..., Any]


def loader(example: Example, dataset: str, folder: Path) -> Load:
    """Return what loads a dataset of a folder."""
    settings = example.module("settings").Settings

    def load(**values: object) -> Any:  # noqa: ANN401
        return example.module("data").load(
            settings(dataset=dataset, data_dir=str(folder), **values)
        )

    return load


def test_a_text_of_ones_own_is_read(text: Example, tmp_path: Path) -> None:
    load = loader(text, "text", tmp_path)
    error = text.module("core.errors").UsageError
    with pytest.raises(error, match=r"no \.txt file in .*: put your text there"):
        load()
    (tmp_path / "2.txt").write_bytes(b"world" * 100)
    (tmp_path / "1.txt").write_bytes(b"hello" * 100)
    with pytest.raises(error, match="1000 bytes, too few for a context of 64"):
        load()
    found = load(context=10, held_out=0.2)
    assert [len(part) for part in (found.train, found.validation, found.test)] == [59, 19, 19]
    tokens, following = found.train.__getitems__([0, 49])
    decode = text.module("data").decode
    assert [decode(row) for row in tokens] == ["hellohello", "hellohello"]
    assert [decode(row) for row in following] == ["ellohelloh", "ellohellow"]


def test_a_table_of_ones_own_is_read(table: Example, tmp_path: Path) -> None:
    load = loader(table, "csv", tmp_path)
    error = table.module("core.errors").UsageError
    names = {"columns": ("b", "a"), "target": "price"}
    with pytest.raises(error, match=r"no table\.csv in .*: put your table there"):
        load(**names)
    path = tmp_path / "table.csv"
    rows = [f'{number},"{number}.5",,{number}e1\n' for number in range(10)]
    path.write_text("".join(["a,b,name,price\n", *rows]))
    with pytest.raises(error, match="has no column 'x1', only a, b, name, price: name those"):
        load()
    found = load(**names)
    assert [len(part) for part in (found.train, found.validation, found.test)] == [8, 1, 1]
    row, target = found.train[0]
    assert row.tolist() == [row[1] + 0.5, row[1]] and target == row[1] * 10
    for bad in ("1,2,,three\n", "1,2,,nan\n", "1,2\n"):
        path.write_text("".join(["a,b,name,price\n", *rows, bad]))
        with pytest.raises(error, match=r"row (10|11)"):
            load(**names)
