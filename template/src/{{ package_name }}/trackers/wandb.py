"""Weights & Biases: online if there is a key; otherwise offline files, which `sync` sends later."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

# W&B adds this variable to the environment later, when other threads may read the environment. So
# it is added here. W&B treats an empty value as not set.
os.environ.setdefault("WANDB_SERVICE", "")

import wandb

from ..engine.errors import UsageError, without_secrets
from ..engine.run.media import binned
from ..engine.run.status import Status
from . import Backend, History, Run

log = logging.getLogger(__name__)

SECONDS = 30  # time limit for an answer of the server


class Tracker(Backend):
    """A run in the W&B project that WANDB_PROJECT names. The default is the package's name.

    Offline, each attempt of a run writes its own folder in `RUN_DIR/wandb`, and `wandb sync` with
    all folders joins them. W&B deletes nothing: if a resumed run repeats steps, their first values
    stay. W&B itself collects system metrics and the output of the job.
    """

    def __init__(self, run: Run) -> None:
        if wandb.run:
            # W&B's background process may be dead: Slurm signals all processes of a job.
            with suppress(Exception):
                wandb.teardown()
        self.directory = run.directory
        # Without a key, wandb would ask for one. Most compute nodes have no internet access anyway.
        online = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_SWEEP_ID")
        start = partial(
            wandb.init,
            project=os.environ.get("WANDB_PROJECT") or __name__.partition(".")[0],
            group=run.experiment,
            name=run.name,
            tags=list(run.tags),
            config={**run.settings, "provenance": run.provenance},
            dir=run.directory,
            id=run.run_id,
            resume="allow",
            settings=wandb.Settings(
                init_timeout=SECONDS,
                quiet=not online,  # otherwise wandb prints its own advice on how to sync
                # In seconds; the default is 15. A killed process loses what it has not written.
                x_transaction_log_flush_interval=1,
            ),
        )
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if online else "offline")
        if mode == "offline" and not online:
            log.info("W&B: WANDB_API_KEY is not set, so this run is offline; sync sends it later")
        try:
            self.run = start(mode=mode)
        except wandb.errors.Error as error:  # the server can't be reached, or the key is not valid
            log.warning(
                "W&B can't be used (%s), so this run is offline; 'python -m %s sync %s' sends "
                "it later",
                without_secrets(str(error)).splitlines()[0],
                __name__.partition(".")[0],
                run.directory,
            )
            self.run = start(mode="offline")
        self.run_id = self.run.id
        # W&B's own step can't go back to the step of a checkpoint.
        self.run.define_metric("*", step_metric="trainer/step")

    def history(self) -> History:
        """Return what earlier attempts logged, with the value 0 for pictures and other media."""
        held: History = {}
        for attempt in sorted(self.directory.glob("wandb/*run-*")):
            if attempt.resolve() == Path(self.run.dir).parent.resolve():
                continue
            for row in rows(attempt):
                step = row.pop("trainer/step", None)
                for name, value in row.items():
                    picture = name.endswith("._type")  # or a histogram, or a table
                    if step is not None and (picture or isinstance(value, int | float)):
                        number = 0.0 if picture else value
                        held.setdefault(name.removesuffix("._type"), {})[int(step)] = number
        return held

    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Record the metrics together with their step."""
        self.run.log({**metrics, "trainer/step": step})

    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Record a picture."""
        self.run.log({name: wandb.Image(image), "trainer/step": step})

    def log_histogram(self, name: str, values: np.ndarray, step: int) -> None:
        """Record a histogram of the finite values."""
        histogram = wandb.Histogram(np_histogram=binned(values))
        self.run.log({name: histogram, "trainer/step": step})

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table."""
        table = wandb.Table(list(columns), [list(row) for row in rows], allow_mixed_types=True)
        self.run.log({name: table, "trainer/step": step})

    def log_text(self, name: str, text: str, step: int) -> None:
        """Record a text as a file of the run."""
        path = Path(self.run.dir) / f"{name.replace('/', '-')}.txt"
        path.write_text(text, encoding="utf-8")
        self.run.save(str(path), base_path=self.run.dir, policy="now")

    def finish(self, status: Status, error: str | None) -> None:
        """Close the run. W&B shows it as a success only if it has finished."""
        self.run.summary["status"] = status
        if status == "preempted" and os.environ.get("WANDB_SWEEP_ID"):
            # This lets the sweep start the trial again.
            self.run.mark_preempting()
        if error:
            self.run.summary["error"] = error
        self.run.finish(exit_code=0 if status == "finished" else 1)


def sync(directory: Path) -> bool:
    """Send the files of all attempts of a run; return False if there are no files.

    Raises:
        UsageError: there is no key, W&B can't be reached, or the run belongs to another user.
    """
    attempts = sorted(str(path) for path in directory.glob("wandb/*run-*") if path.is_dir())
    if not attempts:
        return False
    if any(os.lstat(attempt).st_uid != os.getuid() for attempt in attempts):
        raise UsageError(
            "the run is another user's, and may name any file of yours: let its owner sync it"
        )
    if not os.environ.get("WANDB_API_KEY"):
        raise UsageError("WANDB_API_KEY is not set: add it to .env")
    command = [sys.executable, "-m", "wandb", "sync", *attempts]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    for line in done.stdout.splitlines():
        log.info("%s", line)
    if done.returncode:
        raise UsageError(f"wandb sync ended with exit code {done.returncode}")
    return True


def rows(attempt: Path) -> list[dict]:
    """Return what an attempt logged, read with W&B's command, or [] if this command fails."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(attempt)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [record["history"]["item"] for record in records if record["type"] == "history"]
