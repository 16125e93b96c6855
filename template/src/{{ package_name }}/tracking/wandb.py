"""Weights & Biases: online where a server is meant, else files that `wandb sync` sends later."""

import logging
import os
from collections.abc import Mapping
from functools import partial

import wandb

from . import Run, Status

log = logging.getLogger(__name__)


class Tracker:
    """A run of the project that WANDB_PROJECT names, else of this package's own.

    Offline, each attempt of a run leaves a folder of its own under `RUN_DIR/wandb`; one
    `wandb sync` of them all joins them. W&B takes nothing back: what an interrupted run logged
    after its last checkpoint is there twice, at the same `trainer/step`.
    """

    def __init__(self, run: Run) -> None:
        # Without these, wandb would ask for a key; most compute nodes have no internet anyway.
        online = os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_SWEEP_ID")
        start = partial(
            wandb.init,
            project=os.environ.get("WANDB_PROJECT") or __name__.partition(".")[0],
            group=run.experiment,
            name=run.name,
            tags=list(run.tags),
            config=dict(run.settings),
            dir=run.directory,
            # A sweep's agent chooses the id, by WANDB_RUN_ID.
            id=run.run_id,
            resume="allow",
            settings=wandb.Settings(
                init_timeout=30,
                # What is not in the file yet is lost with the process; the default is 15 seconds.
                x_transaction_log_flush_interval=1,
            ),
        )
        try:
            self.run = start(
                mode=os.environ.get("WANDB_MODE") or ("online" if online else "offline")
            )
        except wandb.errors.CommError as error:
            log.warning("W&B can't be reached, so this run is offline: %s", error)
            self.run = start(mode="offline")
        self.run_id = self.run.id
        # W&B's own step can't go back to that of a checkpoint.
        self.run.define_metric("*", step_metric="trainer/step")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics together with their step."""
        self.run.log({**metrics, "trainer/step": step})

    def flush(self) -> None:
        """Nothing to do: W&B writes every second by itself."""

    def finish(self, status: Status) -> None:
        """Close the run; only a finished one counts as a success."""
        self.run.summary["status"] = status
        self.run.finish(exit_code=0 if status == "finished" else 1)
