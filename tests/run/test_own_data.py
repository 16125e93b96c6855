"""What `load` of data.py may return: several validation sets, weights, sets that wrap others."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from renderer import render_project
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

from .conftest import QUICK, command, edited, srun

DATA = """
from types import SimpleNamespace

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

from .engine import UsageError


class Rows(Dataset):
    def __init__(self, length, seed):
        draw = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(length, 4, generator=draw)
        self.targets = self.inputs.sum(1)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Batches(Rows):
    def __getitems__(self, indices):
        return self.inputs[indices], self.targets[indices]

    @staticmethod
    def collate(batch):
        return batch


def load(settings):
    of = Batches if "batches" in settings.dataset else Rows
    train = of(200, 1)
    train = {
        "subset": lambda: Subset(train, range(40)),
        "split": lambda: random_split(train, [0.2, 0.8], torch.Generator().manual_seed(3))[0],
        "both": lambda: ConcatDataset([Subset(train, range(20)), Subset(train, range(100, 120))]),
        "list": lambda: [train[number] for number in range(40)],
        "all": lambda: train,
    }[settings.dataset.partition("-")[0]]()
    sets = {"near": of(50, 2), "far": of(31, 3)}
    sets["far"].targets = sets["far"].targets + 10
    if settings.validation_size == 1:
        sets = sets["far"]
    return SimpleNamespace(train=train, validation=sets, test=Subset(of(50, 4), range(7)))


def new_data(path, settings):
    raise UsageError("no such data")
"""
MODEL = """
import torch
from torch import nn

from .learner import Learner


class Model(Learner):
    best = ("validation/far/loss", "min")

    def __init__(self, settings):
        super().__init__(settings)
        if settings.validation_size == 1:
            self.best = ("validation/loss", "min")

    def build(self):
        return nn.Linear(4, 1)

    def optimizers(self, network):
        return torch.optim.SGD(network.parameters(), lr=0.1)

    def loss(self, network, batch):
        inputs, targets = batch
        return (network(inputs)[:, 0] - targets).square().mean()
"""
FLAGS = ("--device=cpu", "--trackers=none", "--epochs=2", "--batch-size=5", "--validation-size=9")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a small table as its data."""
    folder = render_project(tmp_path_factory.mktemp("rows") / "demo", tools=["evaluate", "predict"])
    (folder / "configs/train.yaml").unlink()
    (folder / "src/demo/data.py").write_text(DATA)
    (folder / "src/demo/model.py").write_text(MODEL)
    (folder / "src/demo/figures.py").write_text("def draw(*_):\n    return {}\n")
    return folder


@pytest.mark.parametrize("dataset", ["subset", "split", "both", "list"])
def test_sets_that_wrap_others_train(rows: Path, tmp_path: Path, dataset: str) -> None:
    found = []
    for kind in ("rows", "batches"):
        flags = (*FLAGS, f"--dataset={dataset}-{kind}", "--workers=2" if kind == "rows" else "")
        job = srun(rows, tmp_path / kind, 2, *filter(None, flags)).wait()
        assert job.summary["global_step"] == 8, "40 samples, two epochs, 10 in a step"
        assert "40 training samples" in job.log and "4 steps an epoch" in job.log
        found.append(job.summary["test_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_several_validation_sets_have_metrics_of_their_own(rows: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--dataset=all")
    job = srun(rows, tmp_path / "several", 2, *flags).wait()
    alone = srun(rows, tmp_path / "alone", 2, *flags[:-2], "--validation-size=1", flags[-1]).wait()
    lines, one = (
        [line for line in each.metrics() if any("validation" in name for name in line)]
        for each in (job, alone)
    )
    for line, other in zip(lines, one, strict=True):
        assert line["validation/far/loss"] == other["validation/loss"]
        assert line["validation/near/loss"] < line["validation/far/loss"]
    assert job.summary["validation_far_loss"] == alone.summary["validation_loss"]

    run = str(job.run_dir)
    done = command(rows, "evaluate", run, "--split=validation", "--checkpoint=latest")
    assert done.returncode == 0, done.stderr
    kept = json.loads((job.run_dir / "evaluation-validation-00000030.json").read_text())
    last = {name: value for name, value in lines[-1].items() if "validation" in name}
    assert kept["metrics"] == pytest.approx(last, rel=1e-5)
    done = command(rows, "predict", run, "--split=validation/far")
    assert done.returncode == 0, done.stderr
    assert len((job.run_dir / "predictions-validation-far.jsonl").read_text().splitlines()) == 31
    for words in (["--split=validation"], ["--split=validation/no"], ["--split=no"]):
        done = command(rows, "predict", run, *words)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "validation/near" in done.stderr and "validation/far" in done.stderr
    for path, text in ((tmp_path, "no such data"), (tmp_path / "none", "does not exist")):
        done = command(rows, "predict", run, f"--input={path}")
        assert done.returncode == 1 and text in done.stderr and "Traceback" not in done.stderr


def test_digits_of_ones_own_are_predicted(project: Path, tmp_path: Path) -> None:
    from demo.mnist import synthesize

    run = tmp_path / "run"
    assert srun(project, run, 1, *QUICK, "--max-steps=60").wait().codes == [0]
    assert command(project, "predict", run).returncode == 0
    images, _ = synthesize(1_001, seed=2)
    (tmp_path / "new").mkdir()
    for number in range(3):
        Image.fromarray(images[number].numpy()).save(tmp_path / "new" / f"{number}.png")
    done = command(project, "predict", run, f"--input={tmp_path / 'new'}")
    assert done.returncode == 0, done.stderr
    old, new = (
        [json.loads(line) for line in (run / f"predictions-{name}.jsonl").read_text().splitlines()]
        for name in ("test", "new")
    )
    assert [each["name"] for each in new] == ["0.png", "1.png", "2.png"]
    assert [each["prediction"]["digit"] for each in new] == [each["digit"] for each in old[:3]]


def test_a_change_by_a_hook_is_warned_about_once(rows: Path, tmp_path: Path) -> None:
    old = "    def loss("
    hook = "    def on_step(self, training):\n        training.datasets.train.level = 0.5 * "
    hook += f"training.position.step\n        training.datasets.train.cache = None\n\n{old}"
    mine = edited(rows, tmp_path, "model.py", old, hook)
    said = srun(mine, tmp_path / "run", 1, *FLAGS, "--dataset=all").wait().log
    assert len(re.findall("set_progress", said)) == 1 and "on_step" in said and "`level`" in said


def drawn(weights: Any, ranks: int, epochs: int) -> list[list[int]]:  # noqa: ANN401
    """Return the indices of each epoch in the order in which all ranks together use them."""
    from demo.engine.data.batches import EpochSampler, weights_of
    from demo.engine.position import Place

    dataset = TensorDataset(torch.arange(len(weights)))
    dataset.weights = weights  # type: ignore[attr-defined]
    found = []
    for epoch in range(epochs):
        samplers = [
            EpochSampler(len(dataset), 12 // ranks, rank, ranks, 5, weights_of(dataset))
            for rank in range(ranks)
        ]
        for sampler in samplers:
            sampler.place = lambda batch, epoch=epoch: Place(epoch, batch, 0.0)
        steps = zip(*samplers, strict=True)
        found.append([index for step in steps for batch in step for _, _, index in batch])
    return found


def test_weights_decide_how_often_a_sample_is_drawn(project: Path) -> None:
    labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 9 + [3])
    weights = 1 / torch.bincount(labels)[labels]
    weights[0] = 0
    epochs = drawn(weights, 1, 5)
    assert drawn(weights, 3, 5) == epochs, "the same on any number of ranks"
    indices = [index for epoch in epochs for index in epoch]
    assert len(indices) == 5 * 996 and epochs[0] != epochs[1] and 0 not in indices
    shares = Counter(labels[indices].tolist())
    for label in range(4):  # 4 standard deviations: 0.025
        assert shares[label] / len(indices) == pytest.approx(0.25, abs=0.025)


def test_weights_of_parts_count_in_what_wraps_them(project: Path) -> None:
    from demo.engine.data.batches import weights_of
    from demo.engine.errors import UsageError

    weighted, plain = TensorDataset(torch.arange(4)), TensorDataset(torch.arange(2))
    weighted.weights = [1, 2, 3, 4]  # type: ignore[attr-defined]
    whole = ConcatDataset([Subset(weighted, [3, 1]), plain])
    assert weights_of(whole).tolist() == [4, 2, 1, 1]  # type: ignore[union-attr]
    assert weights_of(plain) is None and weights_of(random_split(plain, [1, 1])[0]) is None
    for bad in ([1, 2, 3], [1, 2, 3, -1], [0, 0, 0, 0], [1, 2, 3, float("nan")]):
        weighted.weights = bad  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="weights"):
            weights_of(weighted)


def test_a_sample_that_is_drawn_twice_draws_other_numbers(project: Path) -> None:
    from demo.engine.data.batches import SeededSamples
    from demo.engine.position import Place

    class Noise(TensorDataset):
        def __getitem__(self, index: int) -> Any:  # noqa: ANN401
            return torch.rand(()).item()

    place = Place(0, 0, 0.0)
    samples = SeededSamples(Noise(torch.arange(4)), 7)
    first, second = samples.__getitems__([(place, 10, 3), (place, 11, 3)])
    assert first != second == samples.__getitems__([(place, 11, 3)])[0]
