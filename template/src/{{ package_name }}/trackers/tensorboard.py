"""TensorBoard: event files in the run folder. `tensorboard --logdir runs` shows them."""

import json
import logging
from collections.abc import Mapping

import numpy as np
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from ..engine.run.status import Status
from . import Backend, History, Run

# TensorBoard's reader logs each file that it opens.
logging.getLogger("tensorboard").setLevel(logging.ERROR)


class Tracker(Backend):
    """Event files in `RUN_DIR/tensorboard`."""

    def __init__(self, run: Run) -> None:
        self.folder = run.directory / "tensorboard"
        self.run_id = str(self.folder)
        # Hide what the interrupted run wrote after its last checkpoint, since these steps are
        # repeated.
        purge = run.resume_step + 1 if run.run_id else None
        self.writer = SummaryWriter(str(self.folder), purge_step=purge)
        self.step = run.resume_step
        if not run.run_id:
            settings = {**run.settings, "tags": list(run.tags), "experiment": run.experiment}
            self.log_text("settings", fenced(yaml.safe_dump(settings, sort_keys=False)), 0)
            self.log_text("provenance", fenced(json.dumps(run.provenance, indent=2)), 0)

    def history(self) -> History:
        """Return what earlier attempts logged, without the hidden part."""
        self.writer.flush()
        everything = {"scalars": 0, "images": 0, "histograms": 0}
        events = EventAccumulator(str(self.folder), size_guidance=everything).Reload()
        tags = events.Tags()
        held = {name: {each.step: 0.0 for each in events.Images(name)} for name in tags["images"]}
        held |= {n: {x.step: 0.0 for x in events.Histograms(n)} for n in tags["histograms"]}
        return held | {
            name: {event.step: event.value for event in events.Scalars(name)}
            for name in tags["scalars"]
        }

    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Write a scalar for each metric."""
        self.step = max(self.step, step)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step, walltime=time)

    def log_image(self, name: str, image: np.ndarray, step: int) -> None:
        """Write a picture."""
        self.writer.add_image(name, image, step, dataformats="HWC")

    def log_histogram(self, name: str, values: np.ndarray, step: int) -> None:
        """Write a histogram of the finite values."""
        finite = values[np.isfinite(values)]
        if finite.size:  # otherwise an error, as for values above TensorBoard's last bin
            self.writer.add_histogram(name, finite.clip(-1e19, 1e19), step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a text, with its line breaks."""
        self.writer.add_text(name, text if text.startswith("```") else fenced(text), step)

    def flush(self) -> None:
        """Write what is buffered to the file."""
        self.writer.flush()

    def finish(self, status: Status, error: str | None) -> None:
        """Record how the run ended, and close the file."""
        self.writer.add_text("status", f"{status}: {error}" if error else status, self.step)
        self.writer.close()


def fenced(text: str) -> str:
    """Return a text as a block of Markdown, so that TensorBoard keeps its line breaks."""
    return f"```\n{text.rstrip()}\n```"
