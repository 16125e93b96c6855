"""All ranks stop before the same step."""

import json
from pathlib import Path

import pytest
import torch

from .conftest import edited, spawn, srun, tasks

# The second rank is told to stop after the seventh step.
RANKS = """
import json, sys
from demo.engine.config import Settings
from demo.engine.ranks.process_group import joined
from demo.engine.ranks.signals import StopRequest
from demo.engine.ranks.step_totals import StepTotals

kind, steps = sys.argv[1:]
with joined(Settings(device="cpu")) as world:
    stop = StopRequest()
    totals = StepTotals(world, stop)
    taken = 0
    totals.begin(samples=5, weight=7)
    while True:
        stopping, samples, weight = totals.result()
        if stopping or not samples:
            break
        assert (samples, weight) == (10, 14)
        more = taken + 1 < int(steps)
        totals.begin(samples=5 * more, weight=7 * more)
        taken += 1
        if kind != "whole" and world.rank == 1 and taken == 7:
            stop.received = "SIGTERM"
    print(json.dumps({"taken": taken, "stopping": stopping}))
"""


def run_ranks(project: Path, folder: Path, kind: str, steps: int = 200) -> list[dict[str, int]]:
    """Return what each of two ranks saw."""
    (folder / "ranks_alone.py").write_text(RANKS)
    path = f"{project / 'src'}:{folder}"
    command = ["ranks_alone", kind, str(steps)]
    job = spawn(project, folder / "run", [command] * 2, tasks(2, PYTHONPATH=path)).wait()
    assert job.codes == [0, 0], job.log
    return [json.loads(path.read_text().splitlines()[-1]) for path in job.logs]


@pytest.mark.parametrize(("kind", "taken"), [("stopped", 8), ("whole", 200)])
def test_ranks_stop_before_the_same_step(
    project: Path, tmp_path: Path, kind: str, taken: int
) -> None:
    """The sums of the eighth step had begun when the signal came."""
    found = run_ranks(project, tmp_path, kind)
    assert found == [{"taken": taken, "stopping": kind == "stopped"}] * 2


@pytest.mark.parametrize("collated", ["dropped", "doubled"])
def test_a_batch_counts_as_its_indices(project: Path, tmp_path: Path, collated: str) -> None:
    """`collate` may leave samples out, other ones on each rank, or make several of each."""
    changed = {
        "dropped": "        kept = batch[1] > 2\n        return batch[0][kept], batch[1][kept]\n",
        "doubled": "        return batch[0].repeat(2, 1, 1, 1), batch[1].repeat(2)\n",
    }
    whole = "        return batch\n"
    mine = edited(project, tmp_path, "data.py", whole, changed[collated])
    flags = ("--batch-size=16", "--log-every=1", "--max-steps=10")
    usual = srun(project, tmp_path / "usual", 2, *flags).wait()
    job = srun(mine, tmp_path / "run", 2, *flags).wait()
    assert job.summary["global_step"] == 10
    newest = max((job.run_dir / "checkpoints").glob("step-*.pt"))
    assert torch.load(newest, weights_only=False)["position"]["consumed"] == 10 * 16 * 2
    if collated == "doubled":
        for name in ("train/loss", "train/gradient_norm"):
            ours, theirs = job.metrics()[0][name], usual.metrics()[0][name]
            assert ours == pytest.approx(theirs, rel=1e-3)
