"""Numbers that model.py records become one number over all ranks."""

import itertools
import shutil
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch

from .conftest import Launch, srun

RECORDS = '''

class Model(Model):
    """Records something of each kind."""

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        import os

        from .engine.run.record import record

        rank = int(os.environ["SLURM_PROCID"])
        record("mine/mean", batch[0].new_tensor(rank), weight=1 + rank)
        record("mine/sum", 1, "sum")
        record("mine/max", batch[0].new_tensor(7 - rank), "max")
        record(f"mine/drawn{rank}", torch.rand(()))
        record("mine/training", float(network.training))
        if rank == 1:
            record("of_one", 5)
        return super().loss(network, batch)

    def measure(self, network: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        from .engine.run.record import record

        record("mine/sum", 1000, "sum")
        return super().measure(network, batch)

    def predict(self, network: nn.Module, batch: Batch) -> Tensor:
        from .engine.run.record import record

        record("mine/sum", 1, "sum")
        return super().predict(network, batch)
'''
# The world of one rank.
ALONE = (0, 1, 0, "alone", torch.device("cpu"), None, ("here",), None)
# Two epochs of 58 steps on two ranks: validation comes at the end of each.
FLAGS = ("--max-steps=1000", "--epochs=2", "--batch-size=128", "--log-every=29")


@pytest.fixture(scope="module")
def recording(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose model records."""
    folder = tmp_path_factory.mktemp("recording") / "demo"
    shutil.copytree(project, folder)
    with (folder / "src/demo/model.py").open("a") as file:
        file.write(RECORDS)
    return folder


def test_ranks_come_to_one_number(recording: Path, tmp_path: Path) -> None:
    # Stopped in between two log lines, once.
    flags = (*FLAGS, "--checkpoint-every=7", "--keep-checkpoints=20")
    job = srun(recording, tmp_path / "run", 2, *flags)
    while not list(job.run_dir.glob("checkpoints/step-*35.pt")):
        assert job.processes[0].poll() is None, job.log
        time.sleep(0.01)
    job.kill()
    job = srun(recording, tmp_path / "run", 2, *flags).wait()
    assert job.summary["resumed_from_step"] % 29

    lines = [line for line in job.metrics() if "train/loss" in line]
    assert [line["step"] for line in lines] == [29, 58, 87, 116]
    for line in lines:
        assert line["mine/mean"] == pytest.approx(2 / 3)
        # Of training alone, not of the validation between the second line and the third.
        assert line["mine/sum"] == 2 * 29
        assert (line["mine/max"], line["train/of_one"]) == (7, 5)
        assert line["system/memory_gib"] > 0.05
        assert line["mine/training"] == 1
    # Each step and each rank draws numbers of its own.
    drawn = {line[f"mine/drawn{rank}"] for line in lines for rank in (0, 1)}
    assert len(drawn) == 8 and all(0.3 < each < 0.7 for each in drawn)
    validated = [line for line in job.metrics() if "validation/loss" in line]
    # Three batches on each rank, each evaluation by itself.
    assert [line["validation/mine/sum"] for line in validated] == [6000, 6000]
    # The first batch of a test is predicted too, for the figures, and counts once.
    (tested,) = [line for line in job.metrics() if "test/loss" in line]
    assert tested["test/mine/sum"] == 2000
    assert "mine/mean" in job.log and "system/memory_gib" not in job.log
    assert "step 116  train/loss " in job.log, "it stands first, though others came before it"


@pytest.mark.parametrize("how", ["mean", "sum", "max"])
@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(0.337, dtype=torch.bfloat16),
        torch.tensor(900.0, dtype=torch.float16),
        torch.tensor(True),
        torch.tensor([100], dtype=torch.uint8),
        torch.tensor(3_000_001),
        torch.tensor(2**53 - 1),
        torch.tensor(0.1, dtype=torch.float64),
        0.1,
    ],
    ids=str,
)
def test_numbers_of_any_type_add_up_exactly(
    project: Path, value: float | torch.Tensor, how: str
) -> None:
    """Also across a stop, after which one rank has what two had."""
    alone = import_module("demo.engine.ranks.world").World(*ALONE)
    recorder = import_module("demo.engine.run.record").Recorder()
    for steps, states in ((200, 1), (200, 2), (100, 0)):
        for _ in range(steps):
            recorder.record("mine", value, how, weight=64)
        if states:
            state = [recorder.state_dict()] * states
            recorder = type(recorder)()
            recorder.load_state_dict(state, alone)
    read = recorder.read(alone)
    assert read["train/mine"] == pytest.approx(
        float(value) * (900 if how == "sum" else 1), rel=1e-14
    )


def test_what_has_no_weight_does_not_count(project: Path) -> None:
    recorder = import_module("demo.engine.run.record").Recorder()
    for value, weight in ((float("nan"), 0), (2.0, 3), (torch.tensor(float("inf")), 0)):
        recorder.record("some", value, weight=weight)
        recorder.record("none", value, weight=0)
    alone = import_module("demo.engine.ranks.world").World(*ALONE)
    assert recorder.read(alone) == {"train/some": 2}


@pytest.mark.parametrize("kinds", [*itertools.product((float, torch.tensor), repeat=3)])
def test_the_maximum_of_numbers_and_tensors(project: Path, kinds: tuple) -> None:
    alone = import_module("demo.engine.ranks.world").World(*ALONE)
    recorder = import_module("demo.engine.run.record").Recorder()
    nan = float("nan")
    for values, most in (((-3, -1, -2), -1), ((nan, 1, 2), nan), ((1, nan, 2), nan)):
        for value, kind in zip(values, kinds, strict=True):
            recorder.record("most", kind(value), "max")
        assert recorder.read(alone) == pytest.approx({"train/most": most}, nan_ok=True)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("train/loss", 1), "logs it"),
        (("loss", 1), "logs it"),
        (("train/lr/network0", 1), "logs it"),
        (("train/generator_loss", 1), "logs it"),
        (("data_seconds", 1), "logs it"),
        (("tokens_per_second", 1), "logs it"),
        (("validation/mae", 1), "logs it"),
        (("loss (mine)", 1), "use letters, digits"),
        (("/mine", 1), "use letters, digits"),
        (("mine", 1, "median"), "mean, sum, max"),
        (("first", 1, "sum"), "mean, sum, max"),
        (("mine", torch.ones(3)), r"\(3,\) is not one"),
        (("mine", torch.tensor(3 + 4j)), "torch.complex64 is not"),
        (("mine", 1, "mean", -1), "weight -1.0"),
        (("mine", 1, "mean", torch.tensor(float("nan"))), "weight nan"),
        (("mine", 1, "mean", float("inf")), "weight inf"),
    ],
)
def test_what_can_not_be_recorded_is_said_at_once(
    project: Path, arguments: tuple, complaint: str
) -> None:
    recorder = import_module("demo.engine.run.record").Recorder()
    recorder.record("first", 1.0)
    with pytest.raises(ValueError, match=complaint):
        recorder.record(*arguments)


def test_the_last_steps_are_logged_however_few(launch: Launch) -> None:
    """The end of the last epoch and `max_steps` need not be multiples of log_every."""
    flags = ("--log-every=8", "--batch-size=1000", "--epochs=2")
    for more, steps in (("--max-steps=20", [8, 16, 20]), ("--max-steps=100", [8, 16, 24, 30])):
        job = launch(1, *flags, more, name=more)
        assert job.codes == [0], job.log
        assert [line["step"] for line in job.metrics() if "train/loss" in line] == steps
    before = job.metrics()
    assert launch(1, *flags, more, name=more).metrics() == before, "it has finished"
