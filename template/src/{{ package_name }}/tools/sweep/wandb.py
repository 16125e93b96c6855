"""Runs trials with settings that Weights & Biases chooses.

W&B's agent asks the server for the settings of each trial. It starts this module with them, as
`command` in configs/sweep.yaml says. The module starts the launch command with these settings:

    sweep ── wandb agent ── this module, for one trial ── srun ── all ranks
"""

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ...engine.errors import UsageError
from ...engine.ranks.signals import EXIT_CODE, StopRequest
from ...settings import Settings
from .. import program
from .trial import as_flags, check_launch, run

log = logging.getLogger(__name__)

USAGE = f"{program('sweep')} ENTITY/PROJECT/SWEEP [flags of train] -- LAUNCH COMMAND..."


def search(own: Sequence[str], launch: Sequence[str]) -> int:
    """Run trials until W&B has no more; return 0, 75 if a signal stopped one, 1 if all failed.

    Args:
        own: the sweep's name, and flags of train.
        launch: the command that starts a training.

    Raises:
        UsageError: no sweep is named, no launch command, or a mistake in the settings.
    """
    if own[:1] in (["-h"], ["--help"]):
        print(f"usage: {USAGE}")
        return 0
    if not own or own[0].startswith("-"):
        raise UsageError(f"no sweep is given: name it as `wandb sweep` printed it: {USAGE}")
    sweep, train_flags = own[0], own[1:]
    check_launch(launch)
    settings = Settings.parse(train_flags, prog="sweep")
    name = sweep.rpartition("/")[2]
    command = [*launch, *train_flags, f"--experiment={name}"]
    if not {"wandb", "none"} & set(settings.trackers):
        # W&B chooses settings by the metrics that the trials report to it.
        command += ["--trackers", *settings.trackers, "wandb"]
    stop = StopRequest.install()
    with tempfile.TemporaryDirectory(prefix="sweep-") as notes:
        job = Job(command, Path(settings.run_root, name), Path(notes))
        code = _run_agent(sweep, job, stop)
        if job.is_leaving():
            log.warning("the sweep was stopped; run the same command to continue it")
            return EXIT_CODE
        codes = job.codes()
    log.info("%d trial(s), of which %d failed", len(codes), len(codes) - codes.count(0))
    return 1 if codes and 0 not in codes else code


def _run_agent(sweep: str, job: "Job", stop: StopRequest) -> int:
    """Run W&B's agent, and return its exit code."""
    agent = subprocess.Popen(
        [sys.executable, "-m", "wandb", "agent", sweep],
        # Seconds between W&B's stop of a trial and its kill by the agent. The trial saves in them.
        env={"WANDB_AGENT_KILL_DELAY": "600", **os.environ, **job.as_environment()},
        start_new_session=True,
        preexec_fn=_ignore_all_but_interrupts,
    )
    told = False
    while True:
        try:
            return agent.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            if stop.received:
                job.leave()
            if job.is_leaving() and not told:
                # After SIGINT, the agent starts no other trial, and waits for the running one.
                agent.send_signal(signal.SIGINT)
                told = True
                job.agent_is_told()


def _ignore_all_but_interrupts() -> None:
    # Slurm signals every process of the job. A second signal would make the agent kill its trial.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Job:
    """The state that the process of the sweep and those of its trials share.

    Args:
        command: the launch command with the flags that all trials share.
        folder: where the trials' run folders are.
        notes: a folder for the files of this job.
    """

    def __init__(self, command: Sequence[str], folder: Path, notes: Path) -> None:
        self.command, self.folder, self.notes = command, folder, notes

    @classmethod
    def from_environment(cls) -> "Job":
        """Return the job of this trial."""
        facts = json.loads(os.environ["SWEEP_JOB"])
        return cls(facts["command"], Path(facts["folder"]), Path(facts["notes"]))

    def as_environment(self) -> dict[str, str]:
        """Return the variable from which a trial reads its job."""
        facts = {"command": self.command, "folder": str(self.folder), "notes": str(self.notes)}
        return {"SWEEP_JOB": json.dumps(facts)}

    def leave(self) -> None:
        """Note that the job ends, so that no other trial starts."""
        (self.notes / "leaving").touch()

    def is_leaving(self) -> bool:
        """Return whether the job ends."""
        return (self.notes / "leaving").exists()

    def agent_is_told(self) -> None:
        """Note that the agent knows that the job ends."""
        (self.notes / "told").touch()

    def wait_for_agent(self, seconds: float = 30) -> None:
        """Wait until the agent knows that the job ends, and has had time to act."""
        deadline = time.monotonic() + seconds
        while not (self.notes / "told").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1)

    def ended(self, code: int) -> None:
        """Note the exit code of a trial."""
        with (self.notes / "codes").open("a") as file:
            file.write(f"{code}\n")

    def codes(self) -> list[int]:
        """Return the exit codes of the trials."""
        file = self.notes / "codes"
        return [int(line) for line in file.read_text().split()] if file.exists() else []


def trial(argv: Sequence[str]) -> int:
    """Run a trial; return its exit code, 0 if W&B stopped it.

    Args:
        argv: the settings, as a JSON object.
    """
    stop = StopRequest.install()
    job = Job.from_environment()
    if job.is_leaving():
        return EXIT_CODE
    run_dir = job.folder / os.environ["WANDB_RUN_ID"]
    flags = [*as_flags(json.loads(argv[0])), f"--run-dir={run_dir}"]
    log.info("trial %s: %s", run_dir.name, " ".join(flags))
    code, _ = run([*job.command, *flags], stop, job.is_leaving)
    if code == EXIT_CODE and stop.received and not job.is_leaving():
        log.info("W&B stopped the trial %s", run_dir.name)
        code = 0
    elif code == EXIT_CODE:
        # Slurm has signalled only the ranks, because the time limit is near.
        job.leave()
        # Otherwise the agent would report the trial as finished, and ask for another one.
        job.wait_for_agent()
    job.ended(code)
    return code


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    sys.exit(trial(sys.argv[1:]))
