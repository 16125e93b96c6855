"""A rank that computes more slowly than the others is named once, with its node."""

import json
import shutil
from pathlib import Path

import pytest

from .conftest import QUICK, Job, command, spawn, tasks

# A batch takes 20 ms for each of its weight, and ten times as long on the rank SLOW. With UNEVEN,
# the batches of rank 1 weigh three times as much.
SLEEPS = '''

class Model(Model):
    """Takes its time."""

    def batch_weight(self, batch: Batch) -> int:
        import os

        uneven = "UNEVEN" in os.environ and os.environ["SLURM_PROCID"] == "1"
        return 3 if uneven else 1

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        import os
        import time

        from .plugins import slow_ranks

        slow_ranks.SECONDS = 0.0
        slow = os.environ.get("SLOW") == os.environ["SLURM_PROCID"]
        time.sleep(0.02 * self.batch_weight(batch) * (1 + 9 * slow))
        return super().loss(network, batch)
'''


@pytest.fixture(scope="module")
def sleepy(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose ranks have the speed that the environment sets."""
    folder = tmp_path_factory.mktemp("sleepy") / "demo"
    shutil.copytree(project, folder)
    with (folder / "src/demo/model.py").open("a") as file:
        file.write(SLEEPS)
    return folder


def train(project: Path, run_dir: Path, *flags: str, nodes: int = 2, **env: str) -> Job:
    """Train on two ranks, on nodes that only Slurm's variables tell apart."""
    flags = (*QUICK, "--max-steps=16", "--batch-size=8", "--log-every=1", *flags)
    words = ["demo", "train", f"--run-dir={run_dir}", *flags]
    envs = [
        {**each, "SLURMD_NODENAME": f"n{1 + rank % nodes}"}
        for rank, each in enumerate(tasks(2, BAD_NODES_FILE=f"{run_dir}.nodes", **env))
    ]
    return spawn(project, run_dir, [words] * 2, envs).wait()


def slow(job: Job) -> list[str]:
    """Return the slow ranks in status.json; check that the log has the same."""
    said = json.loads((job.run_dir / "status.json").read_text())["warnings"]
    assert job.log.count(" is slow: ") == len(said)
    assert all(each in job.log for each in said)
    return said


def test_a_slow_rank_is_named_once_and_its_node_noted(sleepy: Path, tmp_path: Path) -> None:
    job = train(sleepy, tmp_path / "run", SLOW="1")
    (said,) = slow(job)
    assert said.startswith("rank 1 on ") and said.endswith("or submit with --exclude=n2")
    assert (tmp_path / "run.nodes").read_text() == "n2\n"
    assert "forward_seconds" not in job.log
    # Rank 0 takes 20 ms, rank 1 takes 200.
    seconds = [line["system/forward_seconds"] for line in job.metrics() if "train/loss" in line]
    assert len(seconds) == 16 and min(seconds) > 0.1
    for folder in (job.run_dir, job.run_dir.parent):
        done = command(sleepy, "runs", folder)
        assert said[:60] in done.stdout, done.stdout + done.stderr


def test_of_one_node_none_is_excluded(sleepy: Path, tmp_path: Path) -> None:
    (said,) = slow(train(sleepy, tmp_path / "run", nodes=1, SLOW="0"))
    assert said.startswith("rank 0 on ") and "--exclude" not in said
    assert not (tmp_path / "run.nodes").exists()


def test_a_rank_with_more_to_do_is_not_slow(sleepy: Path, tmp_path: Path) -> None:
    """Its batches weigh more, as longer texts do."""
    job = train(sleepy, tmp_path / "run", UNEVEN="1")
    assert slow(job) == []


def test_with_fsdp_nothing_is_said(sleepy: Path, tmp_path: Path) -> None:
    """All ranks wait in the forward pass."""
    job = train(sleepy, tmp_path / "run", "--strategy=fsdp", SLOW="1")
    assert slow(job) == []
    assert not any("system/forward_seconds" in line for line in job.metrics())
