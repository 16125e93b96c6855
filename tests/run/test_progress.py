"""Data that change while the training goes on: a dataset knows for which step it reads."""

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from .conftest import PACED, Job, own_project, srun

# Each sample says for which step its dataset read it.
DATA = """
from types import SimpleNamespace

import torch
from torch.utils.data import ConcatDataset, Dataset, random_split

from .engine import ShardStream


class Curriculum:
    def __init__(self):
        self.place = None

    def set_progress(self, epoch, step, progress):
        self.place = torch.tensor([epoch, step, progress], dtype=torch.float64)


class Rows(Curriculum, Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.randn(4), self.place


class Decoder(Curriculum):
    def decode(self, number):
        return torch.randn(4), self.place


def read(shard):
    return iter(range(12))


class Plain(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.randn(4), torch.zeros(3)


def load(settings):
    train = {
        "rows": Rows,
        "wrapped": lambda: ConcatDataset(random_split(Rows(), [24, 24])),
        "stream": lambda: ShardStream(range(4), read, decode=Decoder().decode, sizes=[12] * 4),
    }[settings.dataset]()
    return SimpleNamespace(train=train, validation=Plain(), test=Plain())
"""
MODEL = """
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from .learner import Learner


class Model(Learner):
    def build(self):
        return nn.Linear(4, 1)

    def optimizers(self, network):
        return torch.optim.SGD(network.parameters(), lr=0.01)

    def loss(self, network, batch):
        return network(batch[0]).square().mean()

    def train_step(self, updater):
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
        batches = [each.batch[1] for each in updater.batches if each.samples]
        self.places = torch.cat(batches).tolist()
        super().train_step(updater)

    def on_step(self, training):
        run, rank = training.checkpointing.run_dir, training.world.rank
        with Path(run, f"places-{rank}.jsonl").open("a") as file:
            line = {"epoch": training.position.epoch, "step": training.position.step - 1}
            file.write(json.dumps({**line, "places": self.places}) + "\\n")
"""
FLAGS = ("--batch-size=2", "--accumulate=2", "--epochs=3", "--validate-epochs=0", "--warmup=0")
FLAGS += ("--schedule=constant", "--log-every=1", "--checkpoint-every=4", "--max-steps=1000")


@pytest.fixture(scope="module")
def curriculum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose samples say for which step they were read."""
    return own_project(tmp_path_factory.mktemp("curriculum"), DATA, MODEL)


SOON = {("rows", 1, 0), ("wrapped", 2, 2), ("stream", 2, 2)}


def places(job: Job, ranks: int) -> dict[tuple[int, int], dict[str, Any]]:
    """Return what each rank trained on, by rank and step; a step taken again replaces itself."""
    found = {}
    for rank in range(ranks):
        for line in (job.run_dir / f"places-{rank}.jsonl").read_text().splitlines():
            values = json.loads(line)
            found[rank, values["step"]] = values
    return found


@pytest.mark.parametrize(
    ("dataset", "ranks", "workers"),
    [
        pytest.param(*case, marks=() if case in SOON else pytest.mark.slow)
        for case in itertools.product(("rows", "wrapped", "stream"), (1, 2), (0, 2))
    ],
)
def test_each_sample_is_read_for_its_own_step(
    curriculum: Path, tmp_path: Path, dataset: str, ranks: int, workers: int
) -> None:
    """Although steps are loaded ahead, and in a run that was stopped and resumed."""
    flags = (*FLAGS, f"--dataset={dataset}", f"--workers={workers}")
    whole = srun(curriculum, tmp_path / "whole", ranks, *flags).wait()
    expected = places(whole, ranks)
    steps = 48 // (4 * ranks)
    for (_, step), values in expected.items():
        assert values["places"], values
        for epoch, read_for, progress in values["places"]:
            assert (epoch, read_for) == (step // steps, step) == (values["epoch"], step)
            assert progress == pytest.approx(step / (3 * steps))
    assert {step for _, step in expected} == set(range(3 * steps))

    job = srun(curriculum, tmp_path / "run", ranks, *flags, **PACED)
    job.wait_for_step(steps + 2)
    job.processes[-1].send_signal(signal.SIGTERM)
    assert set(job.wait().codes) == {75}, job.log
    job = srun(curriculum, tmp_path / "run", ranks, *flags).wait()
    assert places(job, ranks) == expected
    assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
