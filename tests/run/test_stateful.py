"""An iterable dataset with a state of its own, such as a replay buffer, comes back exactly."""

import json
import signal
from pathlib import Path

import pytest

from .conftest import PACED, Job, edited, own_project, srun

DATA = """
from types import SimpleNamespace

import torch
from torch.utils.data import Dataset, IterableDataset


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
        return torch.randn(4), torch.zeros(2)


def load(settings):
    train = Replay(30 if settings.dataset == "short" else 10**9)
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
        self.drawn = [each.batch[1].tolist() for each in updater.batches if each.samples]
        super().train_step(updater)

    def on_step(self, training):
        step, rank = training.position.step, training.world.rank
        training.datasets.train.push(step + rank / 10)
        with Path(training.checkpointing.run_dir, f"drawn-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([step, self.drawn]) + "\\n")
"""
FLAGS = ("--batch-size=2", "--accumulate=2", "--validate-epochs=1", "--warmup=0")
FLAGS += ("--schedule=constant", "--log-every=1", "--checkpoint-every=3")


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose training set is a replay buffer, to which a hook pushes after each step."""
    return own_project(tmp_path_factory.mktemp("replay"), DATA, MODEL)


def drawn(job: Job, ranks: int) -> dict[tuple[int, int], list]:
    """Return what each rank trained on, by rank and step."""
    return {
        (rank, step): values
        for rank in range(ranks)
        for step, values in map(
            json.loads, (job.run_dir / f"drawn-{rank}.jsonl").read_text().splitlines()
        )
    }


CASES = {
    "one rank": (1, ["--dataset=short", "--epochs=3", "--max-steps=1000", "--workers=0"]),
    "uneven ranks": (2, ["--dataset=short", "--epochs=3", "--max-steps=1000", "--workers=2"]),
    "fsdp": (2, ["--dataset=endless", "--max-steps=20", "--strategy=fsdp", "--workers=0"]),
}
SOON = {("one rank", 8), ("uneven ranks", 9), ("fsdp", 8)}


@pytest.mark.parametrize(
    ("case", "stop"),
    [
        pytest.param(case, stop, marks=() if (case, stop) in SOON else pytest.mark.slow)
        for case in CASES
        for stop in (1, 8, 9)
    ],
)
def test_a_state_is_resumed_exactly(replay: Path, tmp_path: Path, case: str, stop: int) -> None:
    """In the first step, within an epoch, and near its end, where ranks have run out of samples."""
    ranks, flags = CASES[case]
    whole = srun(replay, tmp_path / "whole", ranks, *FLAGS, *flags).wait()
    assert whole.codes == [0] * ranks, whole.log
    expected = drawn(whole, ranks)
    read_for = [value[1] for values in expected.values() for batch in values for value in batch]
    assert set(read_for) == {float(step - 1) for _, step in expected}

    job = srun(replay, tmp_path / "run", ranks, *FLAGS, *flags, **PACED)
    job.wait_for_step(stop)
    job.processes[-1].send_signal(signal.SIGTERM)
    assert set(job.wait().codes) == {75}, job.log
    job = srun(replay, tmp_path / "run", ranks, *FLAGS, *flags).wait()
    assert job.codes == [0] * ranks, job.log
    assert drawn(job, ranks) == expected
    assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"]


def test_a_state_that_a_checkpoint_can_not_hold_is_refused_at_once(
    replay: Path, tmp_path: Path
) -> None:
    mine = edited(
        replay,
        tmp_path,
        "data.py",
        '"buffer": self.buffer',
        '"buffer": __import__("fractions").Fraction(1)',
    )
    job = srun(mine, tmp_path / "run", 2, *FLAGS, "--dataset=endless", "--max-steps=9").wait()
    assert job.codes == [1, 1] and "Traceback" not in job.log
    assert "state_dict of the training" in job.log and "step 1 " not in job.log


def test_an_added_rank_starts_with_a_new_set(replay: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--dataset=endless")
    srun(replay, tmp_path / "run", 1, *flags, "--max-steps=4").wait()
    job = srun(replay, tmp_path / "run", 2, *flags, "--max-steps=6").wait()
    assert job.codes == [0, 0], job.log
    assert "1 rank(s)" in job.log and "new set" in job.log
    found = drawn(job, 2)
    assert {value for batch in found[0, 6] for value, _ in batch} - {0.0, 5.1}
    assert {value for batch in found[1, 6] for value, _ in batch} <= {0.0, 5.1}
