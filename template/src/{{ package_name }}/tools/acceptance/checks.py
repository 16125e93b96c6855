"""The checks of a project on a cluster, the simplest first."""

import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.foreign import read_object
from ...engine.ranks import slurm_commands as slurm
from ...settings import Settings
from ...trackers import select
from .. import program
from .jobs import LABEL, Failure, Job, Jobs, failure

MODES = ("cpu", "single_node", "multi_node")
FACTS: dict[str, Any] = {
    "trained_seconds": float,
    "parameters_sha256": str,
    "resumed_from_step": int | None,
}


class Check(NamedTuple):
    """A row of the table.

    Attributes:
        run: runs the check, and returns the last column of the row. Raises Failure with the
            reason if the check fails.
    """

    name: str
    run: Callable[[], str]


class Checks:
    """The checks of a project.

    Args:
        settings, flags: settings of each training, and the flags that give them.
        jobs: submits the jobs.
        folder: contains the runs.
        seconds: duration of the training that is stopped.

    Attributes:
        steps: number of steps of that training.
        reference: summary of the same training without a stop.
        tried: whether that training has started.
    """

    def __init__(
        self, settings: Settings, flags: Sequence[str], jobs: Jobs, folder: Path, seconds: float
    ) -> None:
        self.settings, self.flags, self.jobs = settings, flags, jobs
        self.folder, self.seconds = folder, seconds
        self.modes = [mode for mode in MODES if script_of(mode).exists()]
        self.steps = 100
        self.reference: dict[str, Any] | None = None
        self.tried = False

    def __iter__(self) -> Iterator[Check]:
        """Yield the checks for which the project has scripts."""
        if Path("slurm/build_image.sbatch").exists():
            yield Check("image", self.image)
        if Path("slurm/doctor.sbatch").exists():
            yield Check("doctor here", self.doctor)
            yield Check("doctor on nodes", lambda: self.job("slurm/doctor.sbatch", *self.flags))
        if Path("slurm/check_comm.sbatch").exists():
            yield Check("check-comm", self.communication)
        for mode in self.modes[:-1]:
            yield Check(f"train {mode}", partial(self.short, mode))
        if self.modes:
            yield Check(f"train {self.modes[-1]}", self.long)
            yield Check("stop and resume", self.stop)
            if "\n#SBATCH --requeue" in script_of(self.modes[-1]).read_text("utf-8"):
                yield Check("requeue", self.requeue)
            if select(self.settings.trackers):
                yield Check("trackers", self.trackers)

    def job(self, script: str, *arguments: str) -> str:
        """Submit a script, and wait until its job has completed."""
        self.jobs.finish(self.jobs.submit(script, *arguments))
        return ""

    def communication(self) -> str:
        """Let the ranks of a job communicate, on the same devices as in a training."""
        device: str = self.settings.device
        if device == "auto" and self.modes:
            found = re.search(r"--device (\w+)", script_of(self.modes[-1]).read_text("utf-8"))
            device = found[1] if found else device
        flags = f"--device={device}", f"--backend={self.settings.backend}"
        job = self.jobs.submit("slurm/check_comm.sbatch", *flags)
        self.jobs.finish(job)
        said = [line for line in job.said().splitlines() if "all results are right" in line]
        return LABEL.sub("", said[-1]) if said else ""

    def image(self) -> str:
        """Build the image of the other jobs, or install missing packages, if not done yet."""
        made = Path("container/image.sif")
        if not Path("container/apptainer.def").exists():
            made = Path("container/env")
        if made.exists():
            return f"{made} exists"
        return self.job("slurm/build_image.sbatch") or f"{made} was built"

    def doctor(self) -> str:
        """Check this machine, and whether Slurm accepts the scripts."""
        command = [sys.executable, *program("doctor").split()[1:], *self.flags]
        # In its own session, the doctor does not get Ctrl-C. Only this process handles it.
        done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
        self.jobs.check()
        lines = done.stdout.splitlines() or done.stderr.splitlines() or ["doctor printed nothing"]
        if done.returncode:
            error = next((line for line in lines if line.startswith("error")), lines[-1])
            raise Failure(" ".join(error.split()), done.stdout + done.stderr)
        return lines[-1]

    def start(self, mode: str, name: str, *options: str, env: str = "") -> tuple[Job, Path]:
        """Submit a deterministic training; return its job and its run folder."""
        folder = self.folder / name
        flags = [*self.flags, f"--run-dir={folder}", f"--max-steps={self.steps}"]
        flags += ["--epochs=1000000", "--validate-epochs=0", "--deterministic", "--trackers=none"]
        return self.jobs.submit(str(script_of(mode)), *flags, options=options, env=env), folder

    def finish(self, job: Job, folder: Path) -> dict[str, Any]:
        """Wait until a training has completed, and return its summary."""
        self.jobs.finish(job)
        try:
            return read_object(folder / "summary.json", FACTS)
        except (OSError, ValueError) as error:
            raise Failure(f"the job completed, but summary.json can't be read: {error}") from None

    def short(self, mode: str) -> str:
        """Train for a few steps."""
        self.finish(*self.start(mode, mode))
        return f"{self.steps} steps"

    def long(self) -> str:
        """Train for about `seconds`."""
        self.unstopped()
        return f"{self.steps} steps in {self.unstopped()['trained_seconds']:.0f} s"

    def unstopped(self) -> dict[str, Any]:
        """Return the summary of a training without a stop, which takes about `seconds`."""
        mode = self.modes[-1]
        if self.tried and not self.reference:
            raise Failure(f"not run, because 'train {mode}' failed")
        self.tried = True
        while not self.reference:
            found = self.finish(*self.start(mode, f"{mode}-{self.steps}"))
            took = max(found["trained_seconds"], 0.01)
            if took > self.seconds / 2:
                self.reference = found
            else:
                self.steps = math.ceil(self.steps * min(self.seconds / took, 100))
        return self.reference

    def send(self, job: Job, folder: Path) -> None:
        """Wait for the first steps of a training, then send it the signal before a time limit."""
        facts = self.jobs.wait(job, until=lambda _: (folder / "metrics.jsonl").exists())
        if facts["JobState"] == "COMPLETED":
            raise Failure(f"it ended before the signal: try --seconds={4 * self.seconds:.0f}")
        if job not in self.jobs.running:
            raise failure(job, facts)
        slurm.ask("scancel", "--signal=USR2", job.id)

    def compare(self, found: dict[str, Any], how: str) -> str:
        """Compare a stopped and resumed training with one without a stop.

        Args:
            found: summary of the resumed training.
            how: how it was stopped, for the row.

        Returns:
            The text of the row, with the step of the stop.

        Raises:
            Failure: it did not resume, or ended with different parameters.
        """
        step, same = found.get("resumed_from_step"), self.unstopped()["parameters_sha256"]
        if not step:
            raise Failure(f"{how}, but it started again at step 0 instead of resuming")
        if found["parameters_sha256"] != same:
            raise Failure(f"{how} at step {step}, but it ended with different parameters")
        return f"{how} at step {step} of {self.steps}, and ended with the same parameters"

    def stop(self) -> str:
        """Stop a training with the signal, and submit it again."""
        self.unstopped()
        mode = self.modes[-1]
        job, folder = self.start(mode, "stopped", "--no-requeue", env="MAX_REQUEUES=0")
        self.send(job, folder)
        facts = self.jobs.wait(job)
        if facts.get("ExitCode") != "75:0":
            raise failure(job, facts)
        return self.compare(self.finish(*self.start(mode, "stopped", "--no-requeue")), "stopped")

    def requeue(self) -> str:
        """Stop a training with the signal, and wait until Slurm has requeued it."""
        self.unstopped()
        job, folder = self.start(self.modes[-1], "requeued")
        self.send(job, folder)
        facts = self.jobs.wait(job, until=lambda facts: int(facts.get("Restarts") or 0) > 0)
        if job not in self.jobs.running:
            raise failure(job, facts)
        return self.compare(self.finish(job, folder), "requeued")

    def trackers(self) -> str:
        """Log a run to each tracker from a compute node, and read it back."""
        self.job(
            str(script_of(self.modes[min(1, len(self.modes) - 1)])),
            "check-trackers",
            f"--run-root={self.folder}",
            *self.flags,
        )
        return ", ".join(select(self.settings.trackers))


def script_of(mode: str) -> Path:
    """Return the batch script of a launch mode."""
    return Path(f"slurm/train_{mode}.sbatch")
