"""Activation recomputation: the same training with less memory."""

from pathlib import Path

import pytest
from renderer import render_project

from .conftest import Job, srun

# Blocks with all that a second pass could change: random numbers, running statistics, the vectors
# of a spectral norm, recorded numbers. The loss says how much the forward pass keeps.
NETWORK = '''

from typing import Any

from .engine import record


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 512))
        layers = (nn.BatchNorm1d(32), wide, nn.GELU(), nn.Dropout(0.2), nn.Linear(512, 32))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            record("passes", 1.0, "sum")
        return x + self.layers(x)


class Model(Model):
    """Digits by blocks."""

    def build(self) -> nn.Module:
        blocks = nn.Sequential(*(Block() for _ in range(3)))
        return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 32), blocks, nn.Linear(32, 10))

    def fsdp_units(self, network: nn.Module) -> list[nn.Module]:
        return [*network[2], network[2]]  # these contain others, which the blocks do not

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        kept = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            value = super().loss(network, batch)
        if torch.is_grad_enabled():
            record("kept", kept, "max")
        return value
'''
FLAGS = ("--lr=0.02", "--schedule=constant", "--warmup=0", "--ema=0.9")
FLAGS += ("--max-steps=6", "--log-every=1", "--test-batch-size=500")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a network of blocks."""
    folder = render_project(tmp_path_factory.mktemp("blocks") / "demo", launcher="torchrun")
    with (folder / "src" / "demo" / "model.py").open("a") as file:
        file.write(NETWORK)
    return folder


def steps(job: Job, *names: str) -> list[list[float]]:
    """Return the values of the steps."""
    lines = [line for line in job.metrics() if "train/loss" in line]
    return [[line[f"train/{name}"] for name in names] for line in lines]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (1, ()),
        (2, ("--accumulate=2", "--precision=bf16")),
        (2, ("--strategy=fsdp",)),
        pytest.param(2, ("--strategy=fsdp", "--precision=bf16"), marks=pytest.mark.slow),
    ],
)
def test_all_is_the_same_but_for_what_is_kept(
    blocks: Path, tmp_path: Path, ranks: int, flags: tuple[str, ...]
) -> None:
    one, other = (
        srun(blocks, tmp_path / name, ranks, *FLAGS, *flags, *more).wait()
        for name, more in (("kept", ()), ("again", ("--recompute",)))
    )
    assert one.summary["parameters_sha256"] == other.summary["parameters_sha256"]
    assert one.summary["test_loss"] == other.summary["test_loss"]
    names = ("loss", "gradient_norm", "passes")
    assert steps(one, *names) == steps(other, *names)
    assert steps(one, "passes")[0] == [3 * ranks * (2 if "--accumulate=2" in flags else 1)]
    (kept,), (again,) = steps(one, "kept")[0], steps(other, "kept")[0]
    assert again < kept / 4
    assert "3 modules of Sequential" in other.log and "recompute" not in one.log


def test_a_run_goes_on_with_or_without_it(blocks: Path, tmp_path: Path) -> None:
    whole = srun(blocks, tmp_path / "whole", 2, *FLAGS).wait()
    srun(blocks, tmp_path / "run", 2, *FLAGS, "--max-steps=2", "--recompute").wait()
    job = srun(blocks, tmp_path / "run", 2, *FLAGS, "--max-steps=4").wait()
    assert job.summary["resumed_from_step"] == 2
    assert "recompute was True" in job.log
    job = srun(blocks, tmp_path / "run", 2, *FLAGS, "--recompute").wait()
    assert job.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
