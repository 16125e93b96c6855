"""Aim: a repository in the run root, or the server that AIM_REPO names (aim://HOST:PORT)."""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import aim

from . import Run, Status

logging.getLogger("aim").setLevel(logging.WARNING)


class Tracker:
    """A run in Aim; steps that a resumed run repeats are overwritten."""

    def __init__(self, run: Run) -> None:
        self.run = aim.Run(
            run_hash=run.run_id,
            force_resume=run.run_id is not None,
            repo=os.environ.get("AIM_REPO") or repository(Path(run.settings["run_root"])),
            experiment=run.experiment,
            # These would store the environment, with whatever secrets it has, and the terminal.
            log_system_params=False,
            capture_terminal_logs=False,
            system_tracking_interval=None,
        )
        self.run_id = self.run.hash
        if not run.run_id:
            self.run.name = run.name
            self.run["settings"] = dict(run.settings)
            for tag in run.tags:
                self.run.add_tag(tag)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record each metric."""
        for name, value in metrics.items():
            self.run.track(value, name=name, step=step)

    def flush(self) -> None:
        """Nothing to do: Aim writes at once."""

    def finish(self, status: Status) -> None:
        """Note how the run ended, and close it."""
        self.run["status"] = status
        self.run.close()


def repository(root: Path) -> str:
    """Return the folder with Aim's repository; make the repository where there is none yet.

    It is made elsewhere and then moved into place: of several jobs that start at once one wins,
    and none sees half of it.
    """
    if not (root / ".aim").exists():
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=root, prefix=".aim-") as fresh:
            aim.Repo.from_path(fresh, init=True).close()
            with suppress(OSError):  # another job was first
                Path(fresh, ".aim").rename(root / ".aim")
    return str(root)
