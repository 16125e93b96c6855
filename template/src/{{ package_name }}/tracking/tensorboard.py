"""TensorBoard: event files in the run's folder; `tensorboard --logdir runs` shows them."""

from collections.abc import Mapping

import yaml
from torch.utils.tensorboard import SummaryWriter

from . import Run, Status


class Tracker:
    """A run as event files in `RUN_DIR/tensorboard`."""

    def __init__(self, run: Run) -> None:
        folder = run.directory / "tensorboard"
        self.run_id = str(folder)
        # What an interrupted run wrote after its last checkpoint comes again: hide the first.
        purge = run.resume_step + 1 if run.resume_step else None
        self.writer = SummaryWriter(str(folder), purge_step=purge)
        if not run.run_id:
            text = yaml.safe_dump({**run.settings, "tags": list(run.tags)}, sort_keys=False)
            self.writer.add_text("settings", f"```yaml\n{text}```")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a scalar for each metric."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Write what is buffered to the file."""
        self.writer.flush()

    def finish(self, status: Status) -> None:
        """Note how the run ended, and close the file."""
        self.writer.add_text("status", status)
        self.writer.close()
