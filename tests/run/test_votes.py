"""All ranks stop before the same step, whether they ask before each or let some pass."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from .conftest import spawn, srun, tasks

# Steps of no work, or of a tenth of a second. The second rank is told to stop after the seventh.
VOTERS = """
import json, sys, time
from demo.config import Settings
from demo.distributed import joined
from demo.preemption import StopRequest
from demo.votes import Votes

kind, steps = sys.argv[1:]
with joined(Settings(device="cpu")) as world:
    stop = StopRequest()
    votes = Votes(world, stop, uneven=kind == "uneven")
    taken, asked, others = 0, 0, 0
    votes.begin(0, samples=5)
    while True:
        asked += votes.sum is not None
        stopping, samples = votes.result()
        if stopping or not samples:
            break
        assert samples == 10
        votes.begin(taken, samples=5 if taken + 1 < int(steps) else 0)
        time.sleep(0.1 if kind == "slow" else 0)
        taken += 1
        if kind != "whole" and world.rank == 1 and taken == 7:
            stop.received = "SIGTERM"
    print(json.dumps({"taken": taken, "asked": asked, "stopping": stopping}))
"""


def vote(project: Path, folder: Path, kind: str, steps: int = 200) -> list[dict[str, int]]:
    """Return what each of two ranks saw."""
    (folder / "voters.py").write_text(VOTERS)
    path = f"{project / 'src'}:{folder}"
    command = ["voters", kind, str(steps)]
    job = spawn(project, folder / "run", [command] * 2, tasks(2, PYTHONPATH=path)).wait()
    assert job.codes == [0, 0], job.log
    return [json.loads(path.read_text().splitlines()[-1]) for path in job.logs]


@pytest.mark.parametrize("kind", ["even", "slow", "uneven"])
def test_ranks_stop_before_the_same_step(project: Path, tmp_path: Path, kind: str) -> None:
    one, other = vote(project, tmp_path, kind)
    assert one == other
    assert one["stopping"]
    if kind == "even":
        # At the vote after the seventh step, or at most ten steps later.
        assert 7 < one["taken"] <= 18
        assert one["asked"] < one["taken"]
    else:
        # The vote on the eighth step had begun when the signal came.
        assert one == {"taken": 8, "asked": 9, "stopping": True}


def test_few_of_an_epochs_steps_are_voted_on(project: Path, tmp_path: Path) -> None:
    one, other = vote(project, tmp_path, "whole")
    assert one == other
    assert one["taken"] == 200
    assert not one["stopping"]
    assert one["asked"] < 50


def test_samples_that_are_left_out_keep_ranks_in_step(project: Path, tmp_path: Path) -> None:
    """Where `collate` drops what one rank can't read, all count the same."""
    mine = tmp_path / "demo"
    shutil.copytree(project, mine)
    data = mine / "src/demo/data.py"
    code = data.read_text()
    whole = "        return batch\n"
    assert whole in code
    dropped = "        kept = batch[1] > 2\n        return batch[0][kept], batch[1][kept]\n"
    data.write_text(code.replace(whole, dropped))
    job = srun(mine, tmp_path / "run", 2, "--batch-size=16").wait()
    assert job.summary["global_step"] == 30
    newest = max((job.run_dir / "checkpoints").glob("step-*.pt"))
    state = torch.load(newest, weights_only=False)
    assert state["consumed"] == 30 * 16 * 2
