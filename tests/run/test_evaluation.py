"""Evaluation is exact: each sample counts once, with any number of ranks."""

import os
from pathlib import Path

import pytest
from renderer import render_project

from .conftest import Launch, srun


def test_one_two_and_three_ranks_agree_on_an_odd_sized_set(launch: Launch, tmp_path: Path) -> None:
    """1,001 samples: neither two nor three ranks share them evenly."""
    # Barely trained, so that there is something to disagree about.
    assert launch(1, "--max-steps=5", name="first").summary["test_accuracy"] < 0.9
    flags = (f"--resume={tmp_path / 'first'}", "--max-steps=5", "--test-batch-size=64")
    summaries = [launch(n, *flags, name=f"on-{n}").summary for n in (1, 2, 3)]
    assert [summary["world_size"] for summary in summaries] == [1, 2, 3]
    correct = [round(summary["test_accuracy"] * 1001, 6) for summary in summaries]
    assert correct[0] == int(correct[0])
    assert len(set(correct)) == 1
    losses = [summary["test_loss"] for summary in summaries]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_the_default_recipe_reaches_its_accuracy_on_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """One epoch: 99.0 % on MNIST where MNIST_DIR names its files, else on the synthetic digits."""
    folder = os.environ.get("MNIST_DIR")
    dataset = ("--dataset=mnist", f"--data-dir={folder}") if folder else ("--dataset=synthetic",)
    project = render_project(tmp_path / "demo")
    job = srun(project, tmp_path / "run", 2, *dataset, "--max-steps=1000000")
    summary = job.wait().summary
    with capsys.disabled():
        print(f"\n{dataset[0]}: {summary['test_accuracy']:.2%} after {summary['epochs']} epoch")
    assert summary["epochs"] == 1
    assert summary["test_accuracy"] >= 0.99
    assert summary["validation_accuracy"] >= 0.985
