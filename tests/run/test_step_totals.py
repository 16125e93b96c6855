"""All ranks stop before the same step, whether or not they check before each step."""

import json
from pathlib import Path

import pytest
import torch

from .conftest import edited, spawn, srun, tasks

# Steps of no work, or of a tenth of a second. The second rank is told to stop after the seventh.
RANKS = """
import json, sys, time
from demo.engine.config import Settings
from demo.engine.ranks.process_group import joined
from demo.engine.ranks.signals import StopRequest
from demo.engine.ranks.step_totals import StepTotals

kind, steps = sys.argv[1:]
with joined(Settings(device="cpu")) as world:
    stop = StopRequest()
    # As in a later epoch.
    totals = StepTotals(world, stop, 1000, uneven=kind == "uneven")
    taken, asked = 0, 0
    totals.begin(1000, samples=5, weight=7)
    while True:
        asked += totals.summed
        stopping, samples, weight = totals.result()
        if stopping or not samples:
            break
        assert (samples, weight) == (10, 14)
        more = taken + 1 < int(steps)
        totals.begin(1000 + taken, samples=5 * more, weight=7 * more)
        time.sleep(0.1 if kind == "slow" else 0)
        taken += 1
        if kind != "whole" and world.rank == 1 and taken == 7:
            stop.received = "SIGTERM"
    print(json.dumps({"taken": taken, "asked": asked, "stopping": stopping}))
"""


def run_ranks(project: Path, folder: Path, kind: str, steps: int = 200) -> list[dict[str, int]]:
    """Return what each of two ranks saw."""
    (folder / "ranks_alone.py").write_text(RANKS)
    path = f"{project / 'src'}:{folder}"
    command = ["ranks_alone", kind, str(steps)]
    job = spawn(project, folder / "run", [command] * 2, tasks(2, PYTHONPATH=path)).wait()
    assert job.codes == [0, 0], job.log
    return [json.loads(path.read_text().splitlines()[-1]) for path in job.logs]


@pytest.mark.parametrize("kind", ["even", "slow", "uneven"])
def test_ranks_stop_before_the_same_step(project: Path, tmp_path: Path, kind: str) -> None:
    one, other = run_ranks(project, tmp_path, kind)
    assert one == other
    assert one["stopping"]
    if kind == "even":
        # At the first sums that begin after the seventh step.
        assert 7 < one["taken"] <= 7 + 11
        assert one["asked"] < one["taken"]
    else:
        # The sums of the eighth step had begun when the signal came.
        assert one == {"taken": 8, "asked": 9, "stopping": True}


def test_few_of_an_epochs_steps_are_summed(project: Path, tmp_path: Path) -> None:
    one, other = run_ranks(project, tmp_path, "whole")
    assert one == other
    assert one["taken"] == 200
    assert not one["stopping"]
    assert one["asked"] < 50


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
    job = srun(mine, tmp_path / "run", 2, *flags).wait()
    assert job.summary["global_step"] == 10
    newest = max((job.run_dir / "checkpoints").glob("step-*.pt"))
    assert torch.load(newest, weights_only=False)["position"]["consumed"] == 10 * 16 * 2
    if collated == "doubled":
        usual = srun(project, tmp_path / "usual", 2, *flags).wait()
        for name in ("train/loss", "train/gradient_norm"):
            ours, theirs = job.metrics()[0][name], usual.metrics()[0][name]
            assert ours == pytest.approx(theirs, rel=1e-3)
