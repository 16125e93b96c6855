"""Runs with all trackers at once, which the tests of each tracker look at.

Each of them is made once, although several processes run the tests.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import metrics
import pytest
from once import once

from ..conftest import PACED, Job, clean_environment, command, srun
from . import TRACKERS, Shown, reader, show

FLAGS = ("--batch-size=32", "--max-steps=200", "--checkpoint-every=20", "--log-every=5")


@dataclass(frozen=True)
class Past:
    """A run that has ended.

    Attributes:
        run_dir: the run folder. Its store is the folder around it.
        said: the output of its last attempt, or of commands.
        before: what the trackers showed of the run before it was resumed.
        lost: the steps that it had logged after the step from which it was resumed.
    """

    run_dir: Path
    said: Sequence[str]
    before: dict[str, Shown] = field(default_factory=dict)
    lost: Sequence[int] = ()

    @property
    def log(self) -> str:
        """The output of the last attempt."""
        return self.said[-1]


def train(project: Path, folder: Path, ranks: int, *flags: str, **env: str) -> Job:
    """Start a run with all trackers, whose experiment is the folder `trial`."""
    mine = (*FLAGS, f"--run-root={folder}", "--experiment=trial", "--trackers", *TRACKERS)
    return srun(project, folder / "trial/run", ranks, *mine, *flags, **env)


def wait_for_trackers(job: Job) -> None:
    """Wait until all trackers have started, and then for a step between two checkpoints."""
    for tracker in TRACKERS:
        job.wait_for_tracker(0, tracker)
    job.wait_for_step(metrics.last_step(job.run_dir) // 20 * 20 + 30)


@pytest.fixture(scope="session")
def resumed(full_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Past:
    """A run that was killed, shown by the trackers, and resumed to its end."""

    def make(folder: Path) -> Past:
        flags = ("--tags", "odd", "even", "--histograms-every=100", "--register-model=Digits")
        secret = {"API_TOKEN": "correct-horse"}
        killed = train(full_project, folder, 2, *flags, "--log-every=3", **secret, **PACED)
        wait_for_trackers(killed)
        killed.kill()
        before = {tracker: show(tracker, killed.run_dir) for tracker in TRACKERS}
        steps = metrics.series(killed.run_dir)["train/loss"]
        job = train(full_project, folder, 2, *flags, **secret).wait()
        first = job.summary["resumed_from_step"]
        assert 20 <= first < max(steps)
        return Past(job.run_dir, [job.log], before, [step for step in steps if step > first])

    return once(tmp_path_factory, "resumed", make)


@pytest.fixture(scope="session")
def failed(full_project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Past]:
    """The folder of a run that was stopped, as it was then, and the run, which failed later."""

    def make(folder: Path) -> tuple[Path, Past]:
        stopped = train(full_project, folder, 1, **PACED)
        wait_for_trackers(stopped)
        stopped.processes[0].terminate()
        assert stopped.wait().codes == [75], stopped.log
        shutil.copytree(folder / "trial", folder / "stopped/trial")
        job = train(full_project, folder, 1, "--lr=1e9").wait()
        assert job.codes == [1], job.log
        return folder / "stopped/trial/run", Past(job.run_dir, [job.log])

    return once(tmp_path_factory, "failed", make)


RESUMER = """
import json, math, sys
from pathlib import Path
import numpy as np
from demo.trackers import Run, select
from demo.trackers.dispatch import Trackers
store, names = Path(sys.argv[1]), select(sys.argv[2:])

def start(name, **facts):
    folder = store / name
    folder.mkdir(exist_ok=True)
    earlier = facts.pop("earlier", ())
    return Trackers(names, Run(folder, store, f"{store.name}/{name}", "trial", **facts), earlier)

first = [{"step": s, "loss": -s, "late" if s > 20 else "early": s} for s in range(3, 40, 3)]
for step in (0, 20):
    for again in (False, True):
        if again:
            trackers = start(
                f"from-{step}", resume_step=step, earlier=[x for x in first if x["step"] <= step]
            )
        else:
            trackers = start(f"from-{step}")
        for line in [{"step": s, "loss": s, "early": s} for s in (25, 30)] if again else first:
            numbers = {name: value for name, value in line.items() if name != "step"}
            trackers.call("log_metrics", numbers, line["step"], 7.0)
        assert not trackers.finish("finished" if again else "preempted", seconds=300)

trackers = start("odd")
near = np.nextafter(np.float32(1), np.float32(2))
for step, values in enumerate([
    np.array([1, near], np.float32),
    np.array([1, math.nextafter(1, 2)]),
    np.array([1e300, math.nextafter(1e300, 0)]),
    np.array([-1e308, 1e308]),
    np.array([0, 5e-324]),
    np.array([np.nan, np.inf, 2], np.float32),
    np.array([np.nan]),
    np.zeros(3),
]):
    trackers.call("log_histogram", "odd", values, step)
print(json.dumps(trackers.finish("finished", seconds=300)))
"""


@pytest.fixture(scope="session")
def scripted(full_project: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    """The store of runs without a training, and the trackers that an odd histogram switched off.

    The runs `from-0` and `from-20` had come to step 39, and were resumed from these steps.
    """

    def make(folder: Path) -> tuple[Path, list]:
        (folder / "trial").mkdir()
        script = [sys.executable, "-c", RESUMER, str(folder / "trial"), *TRACKERS]
        env = clean_environment(full_project)
        done = subprocess.run(script, env=env, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return folder / "trial", json.loads(done.stdout.splitlines()[-1])

    return once(tmp_path_factory, "scripted", make)


@pytest.fixture(scope="session")
def blocked(full_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Past:
    """A run for which no tracker could start, and what `sync` said of it, until all was there."""

    def make(folder: Path) -> Past:
        places = [reader(tracker).places(folder / "trial/run")[0] for tracker in TRACKERS]
        (folder / "trial/run").mkdir(parents=True)
        for place in places:  # a file where a folder belongs, and a folder for a file
            place.mkdir() if place.suffix else place.touch()
        job = train(full_project, folder, 1, "--max-steps=20").wait()
        assert job.codes == [0], job.log
        still = command(full_project, "sync", str(job.run_dir))
        assert still.returncode == 1, still.stderr
        for place in places:
            place.rmdir() if place.suffix else place.unlink()
        done = command(full_project, "sync", str(job.run_dir))
        assert done.returncode == 0, done.stderr
        # A tracker without its key does not keep the others from their data.
        names = sorted(TRACKERS, key=lambda tracker: not hasattr(reader(tracker), "KEY"))
        more = command(full_project, "sync", str(job.run_dir), "--trackers", *names)
        assert more.returncode == 1, more.stderr
        return Past(job.run_dir, [job.log, still.stderr, done.stderr, more.stderr])

    return once(tmp_path_factory, "blocked", make)
