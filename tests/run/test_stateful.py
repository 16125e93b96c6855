"""Data that know for which step they are read, or have a state of their own, come back exactly."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import PACED, Job, edited, own_project, srun

# A sample says for which step its dataset read it; one of a replay buffer also what it drew.
DATA = """
from types import SimpleNamespace

import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, random_split

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


class Replay(IterableDataset):
    '''What was pushed, drawn at random; an epoch ends after `length` samples of each rank.'''

    def __init__(self, length):
        self.length, self.drawn, self.step = length, 0, -1
        self.buffer = torch.zeros(1, dtype=torch.float64)

    def assign(self, rank, world_size, seed):
        self.rank, self.length = rank, self.length - 4 * rank

    def set_progress(self, epoch, step, progress):
        self.step = step

    def push(self, value):
        self.buffer = torch.cat([self.buffer, torch.tensor([value], dtype=torch.float64)])[-50:]

    def __iter__(self):
        while self.drawn < self.length:
            self.drawn += 1
            chosen = torch.randint(len(self.buffer), ())
            yield torch.rand(4), torch.stack([self.buffer[chosen], torch.tensor(float(self.step))])
        self.drawn = 0

    def state_dict(self):
        return {"drawn": self.drawn, "buffer": self.buffer}

    def load_state_dict(self, state):
        self.drawn, self.buffer = state["drawn"], state["buffer"]


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
        "short": lambda: Replay(30),
        "endless": lambda: Replay(10**9),
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
        return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

    def optimizers(self, network):
        return torch.optim.SGD(network.parameters(), lr=0.01)

    def loss(self, network, batch):
        return network(batch[0]).square().mean()

    def train_step(self, updater):
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
        batches = [each.batch[1] for each in updater.batches if each.samples]
        self.seen = torch.cat(batches).tolist() if batches else []
        super().train_step(updater)

    def on_step(self, training):
        position, rank = training.position, training.world.rank
        if hasattr(training.datasets.train, "push"):
            training.datasets.train.push(position.step + rank / 10)
        with Path(training.checkpointing.run_dir, f"seen-{rank}.jsonl").open("a") as file:
            line = {"epoch": position.epoch, "step": position.step - 1, "rows": self.seen}
            file.write(json.dumps(line) + "\\n")
"""
FLAGS = ("--batch-size=2", "--accumulate=2", "--validate-epochs=1", "--warmup=0")
FLAGS += ("--schedule=constant", "--log-every=1", "--checkpoint-every=3")
EPOCHS = ("--epochs=3", "--max-steps=1000")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose samples say for which step they were read.

    If its training set is a replay buffer, a hook pushes to it after each step.
    """
    return own_project(tmp_path_factory.mktemp("own"), DATA, MODEL)


def seen(job: Job, ranks: int) -> dict[tuple[int, int], dict[str, Any]]:
    """Return what each rank trained on, by rank and step; a step taken again replaces itself."""
    found = {}
    for rank in range(ranks):
        for line in (job.run_dir / f"seen-{rank}.jsonl").read_text().splitlines():
            values = json.loads(line)
            found[rank, values["step"]] = values
    return found


def seen_twice(
    project: Path, folder: Path, ranks: int, flags: tuple[str, ...], stop: int
) -> dict[tuple[int, int], dict[str, Any]]:
    """Return what each rank trained on, which is the same in a run that was stopped and resumed."""
    whole = srun(project, folder / "whole", ranks, *FLAGS, *flags).wait()
    assert whole.codes == [0] * ranks, whole.log
    srun(project, folder / "run", ranks, *FLAGS, *flags, **PACED).stop(stop)
    job = srun(project, folder / "run", ranks, *FLAGS, *flags).wait()
    assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert seen(job, ranks) == seen(whole, ranks)
    return seen(whole, ranks)


SOON = {("rows", 1, 0), ("wrapped", 2, 2), ("stream", 2, 2)}


@pytest.mark.parametrize(
    ("dataset", "ranks", "workers"),
    [
        pytest.param(*case, marks=() if case in SOON else pytest.mark.slow)
        for case in itertools.product(("rows", "wrapped", "stream"), (1, 2), (0, 2))
    ],
)
def test_each_sample_is_read_for_its_own_step(
    own: Path, tmp_path: Path, dataset: str, ranks: int, workers: int
) -> None:
    """Although steps are loaded ahead, and in a run that was stopped and resumed."""
    flags = (*EPOCHS, f"--dataset={dataset}", f"--workers={workers}")
    steps = 48 // (4 * ranks)
    found = seen_twice(own, tmp_path, ranks, flags, steps + 2)
    for (_, step), values in found.items():
        assert values["rows"], values
        for epoch, read_for, progress in values["rows"]:
            assert (epoch, read_for) == (step // steps, step) == (values["epoch"], step)
            assert progress == pytest.approx(step / (3 * steps))
    assert {step for _, step in found} == set(range(3 * steps))


CASES = {
    "one rank": (1, ("--dataset=short", *EPOCHS, "--workers=0")),
    "uneven ranks": (2, ("--dataset=short", *EPOCHS, "--workers=2")),
    "fsdp": (2, ("--dataset=endless", "--max-steps=20", "--strategy=fsdp", "--workers=0")),
}
EARLY = {("one rank", 8), ("uneven ranks", 9), ("fsdp", 8)}


@pytest.mark.parametrize(
    ("case", "stop"),
    [
        pytest.param(case, stop, marks=() if (case, stop) in EARLY else pytest.mark.slow)
        for case in CASES
        for stop in (1, 8, 9)
    ],
)
def test_a_state_is_resumed_exactly(own: Path, tmp_path: Path, case: str, stop: int) -> None:
    """In the first step, within an epoch, and near its end, where ranks have run out of samples."""
    ranks, flags = CASES[case]
    found = seen_twice(own, tmp_path, ranks, flags, stop)
    read_for = {row[1] for values in found.values() for row in values["rows"]}
    assert read_for == {step for _, step in found}


def test_a_state_that_a_checkpoint_can_not_hold_is_refused_at_once(
    own: Path, tmp_path: Path
) -> None:
    mine = edited(
        own,
        tmp_path,
        "data.py",
        '"buffer": self.buffer',
        '"buffer": __import__("fractions").Fraction(1)',
    )
    job = srun(mine, tmp_path / "run", 2, *FLAGS, "--dataset=endless", "--max-steps=9").wait()
    assert job.codes == [1, 1] and "Traceback" not in job.log
    assert "state_dict of the training" in job.log and "step 1 " not in job.log


def test_an_added_rank_starts_with_a_new_set(own: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--dataset=endless")
    srun(own, tmp_path / "run", 1, *flags, "--max-steps=4").wait()
    job = srun(own, tmp_path / "run", 2, *flags, "--max-steps=6").wait()
    assert job.codes == [0, 0], job.log
    assert "1 rank(s)" in job.log and "new set" in job.log
    kept, new = ({value for value, _ in seen(job, 2)[rank, 5]["rows"]} for rank in (0, 1))
    assert kept - {0.0, 5.1} and new <= {0.0, 5.1}
