"""fp16 scales the loss, and skips a step of all ranks when a gradient overflows."""

import math
import signal
from pathlib import Path

import pytest
import torch

from .conftest import PACED, Job, own_project, srun

DATA = """
from types import SimpleNamespace

import torch
from torch.utils.data import TensorDataset


def load(settings):
    inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(inputs, inputs.sum(1))
    return SimpleNamespace(train=rows, validation=rows, test=rows)
"""
MODEL = """
import os
import time

import torch
from torch import nn

from .learner import Learner


class Model(Learner):
    step = 0

    def build(self):
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def optimizers(self, network):
        return torch.optim.AdamW(network.parameters(), lr=float(os.environ.get("RATE", 0.01)))

    def loss(self, network, batch):
        inputs, targets = batch
        outputs = network(inputs)[:, 0].float()
        found = (outputs - targets).square().mean()
        if torch.is_grad_enabled() and self.step == 5 and int(os.environ["SLURM_PROCID"]):
            mean = outputs.mean()
            found = found + 1e30 * (mean - mean.detach())  # only its gradient is large
        return found

    def on_start(self, training):
        self.step = training.position.step

    def on_step(self, training):
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
        self.step = training.position.step
"""
FLAGS = ("--device=cpu", "--trackers=none", "--batch-size=8", "--accumulate=2", "--epochs=6")
FLAGS += ("--clip-norm=1", "--log-every=1", "--warmup=0", "--precision=fp16")


@pytest.fixture(scope="module")
def overflowing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project in which the gradients of the second rank overflow after five steps."""
    return own_project(tmp_path_factory.mktemp("fp16"), DATA, MODEL)


def scale(job: Job) -> dict:
    """Return the state of the scaler in the newest checkpoint."""
    path = max((job.run_dir / "checkpoints").glob("step-*.pt"))
    return torch.load(path, weights_only=True)["scaler"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_overflow_skips_the_step_on_all_ranks(
    overflowing: Path, tmp_path: Path, strategy: str
) -> None:
    flags = (*FLAGS, f"--strategy={strategy}")
    job = srun(overflowing, tmp_path / "whole", 2, *flags).wait()
    summary, lines = job.summary, [line for line in job.metrics() if "train/loss" in line]
    skipped = [int(line["step"]) for line in lines if line["train/skipped_steps"]]
    assert 6 in skipped and len(skipped) < 6, skipped
    assert all(math.isfinite(line["train/loss"]) for line in lines)
    for line in lines:
        assert ("train/gradient_norm" in line) == (line["step"] not in skipped)
    assert summary["global_step"] == len(lines) == 18

    # The first step that counts has the initial weights, as each step without a learning rate.
    still = srun(overflowing, tmp_path / "fp32", 2, *flags, "--precision=fp32", RATE="0").wait()
    norms = {
        line["step"]: line["train/gradient_norm"]
        for line in still.metrics()
        if "train/loss" in line
    }
    first = next(line for line in lines if line["step"] not in skipped)
    assert first["train/gradient_norm"] == pytest.approx(norms[first["step"]], rel=0.01)
    assert "train/skipped_steps" not in still.metrics()[0]

    run = srun(overflowing, tmp_path / "run", 2, *flags, **PACED)
    run.wait_for_step(8)
    run.processes[-1].send_signal(signal.SIGTERM)
    assert set(run.wait().codes) == {75}, run.log
    run = srun(overflowing, tmp_path / "run", 2, *flags).wait()
    assert run.summary["parameters_sha256"] == summary["parameters_sha256"]
    assert scale(run) == scale(job)
    assert scale(job)["scale"] == 2.0 ** (16 - len(skipped))
