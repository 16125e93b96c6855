"""Writes the run folder, calls the trackers, and shows the progress of a run."""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import yaml
from tqdm import tqdm

from ..checkpoint import Checkpointing
from ..config import Settings
from ..errors import UsageError
from ..filesystem import read_bytes, sync_names, write_atomically
from ..ranks.dtensor import full_tensor
from ..ranks.world import World
from . import provenance
from .description import Run, describe_run
from .folder import keep_records, set_aside_earlier
from .logging_setup import log_to_file, read_log
from .meters import JsonLines
from .status import Status, StatusFile

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from torch import nn

log = logging.getLogger(__name__)

NOT_SHOWN = ("system/", "train/data_seconds")  # metrics that are left out of the log


class Trackers(Protocol):
    """The class `Trackers` of trackers/dispatch.py."""

    names: Sequence[str]

    @property
    def failed(self) -> list[str]: ...
    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None: ...
    def log(self, kind: str, *arguments: Any) -> None: ...  # noqa: ANN401
    def flush(self) -> None: ...
    def finish(self, status: Status, error: str | None = None) -> None: ...


class RunLogger:
    """The run folder, the trackers and the progress bar.

    On other ranks than 0, only the trackers are called, for the rank's own numbers, and only with
    `track_all_ranks`. Every rank makes the same calls.

    Args:
        settings: the effective settings, with a run folder.
        world: the ranks.
        start_trackers: starts the trackers, given the run and its earlier metrics.
        checkpointing: of the run; it has the step that this attempt resumes from.
        best: the metric that decides the best checkpoint, and "min" or "max".

    Attributes:
        ending: the status at the end of the run, unless an error ends it.

    Raises:
        UsageError: the run folder can't be written to.
    """

    def __init__(
        self,
        settings: Settings,
        world: World,
        start_trackers: Callable[[Run, Sequence[Mapping[str, Any]]], Trackers],
        checkpointing: Checkpointing,
        best: tuple[str, str],
    ) -> None:
        self.checkpointing, self.active = checkpointing, world.is_main
        self.ending: Status = "failed"
        self.folder = Path(str(settings.run_dir))
        facts = world.on_main(lambda: self._open(settings, world))
        if self.active:
            self.status.state |= {"best_metric": best[0], "best_direction": best[1]}
            self.best(checkpointing.position.best_score, checkpointing.position.best_step)
        run = describe_run(settings, facts, checkpointing.resumed_from or 0, world.rank)
        self.trackers = start_trackers(run, self.lines.earlier if self.active else ())

    def _open(self, settings: Settings, world: World) -> dict[str, Any]:
        """Open the files of the run folder; return the provenance."""
        facts = provenance.collect(world)
        resume_step = self.checkpointing.resumed_from or 0
        try:
            # The folders of the run, of its experiment and of all runs may be new.
            for folder in list(self.folder.absolute().parents)[:3]:
                with suppress(OSError):  # another user may own it
                    sync_names(folder)
            set_aside_earlier(self.folder, resume_step)
            keep_records(self.folder)
            self._write("config.yaml", yaml.safe_dump(settings.as_dict(), sort_keys=False))
            self._write("provenance.json", json.dumps(facts, indent=2))
            path = self.folder / "metrics.jsonl"
            self.lines = JsonLines(path, resume_step, self.checkpointing.line_count)
            self.log = log_to_file(self.folder / "log.txt")
            with suppress(FileNotFoundError):
                read_bytes(self.folder / "trackers.json")  # raises here, not in a tracker's thread
        except OSError as error:
            raise UsageError(
                f"can't write to the run folder {self.folder}: {error.strerror}; choose another "
                "with --run-dir or --run-root"
            ) from None
        self.status = StatusFile(self.folder / "status.json", resume_step)
        return facts

    @property
    def line_count(self) -> int | None:
        """The number of lines of metrics.jsonl; None on other ranks than 0."""
        return self.lines.count if self.active else None

    def progress_bar(self, epoch: int, done: int, total: int | None) -> tqdm:
        """Return a bar over an epoch's steps; it shows only in a terminal."""
        return tqdm(
            desc=f"epoch {epoch + 1}",
            initial=done,
            total=total,
            unit="step",
            leave=False,
            disable=not (self.active and sys.stderr.isatty()),
        )

    def metrics(
        self,
        step: int,
        progress: float,
        values: Mapping[str, float],
        own: Mapping[str, float] | None = None,
    ) -> None:
        """Record and log the numbers of a step.

        Args:
            step, progress: of the training; progress goes from 0 to 1.
            values: over all ranks.
            own: this rank's, which other ranks than 0 send to their trackers.
        """
        now = time.time()
        if not self.active:
            self.trackers.log_metrics(own or {}, step, now)
            return
        self.lines.write(step, now, values)
        self.trackers.log_metrics(values, step, now)
        self.status.update(step, progress)
        shown = (
            f"{name} {value:.5g}"
            for name, value in values.items()
            if not name.startswith(NOT_SHOWN)
        )
        with tqdm.external_write_mode():
            log.info("step %d  %s", step, "  ".join(shown))

    def best(self, score: float | None, step: int) -> None:
        """Save the best validation so far, for `runs` and sweeps."""
        if self.active:
            self.status.state |= {"best_score": score, "best_step": step}

    def figures(self, step: int, figures: "Mapping[str, Figure]") -> None:
        """Save figures as PNG files, and send them to the trackers."""
        for name, figure in figures.items():
            path = self.folder / "figures" / f"{name.replace('/', '-')}-{step:08}.png"
            try:
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, partial(figure.savefig, format="png"))
            except OSError as error:
                log.error("could not write %s: %s", path, error.strerror)
            if self.trackers.names:
                self.trackers.log("image", name, pixels(figure), step)

    def histograms(self, step: int, parameters: "Mapping[str, nn.Parameter]") -> None:
        """Send parameters and gradients to the trackers, as histograms; every rank calls this."""
        for name, parameter in parameters.items():
            for what, tensor in (("parameters", parameter), ("gradients", parameter.grad)):
                if tensor is not None:
                    values = full_tensor(tensor.detach())
                    if self.active:
                        array = values.float().cpu().numpy().ravel()
                        self.trackers.log("histogram", f"{what}/{name}", array, step)

    def flush(self) -> None:
        """Save what was recorded so far, and write metrics.jsonl to the disk.

        Raises:
            OSError: a line of metrics.jsonl can't be written.
        """
        self.trackers.flush()
        if self.active:
            self.lines.sync()

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json and log it."""
        if self.active:
            try:
                self._write("summary.json", json.dumps(values, indent=2))
            except OSError as error:
                raise UsageError(
                    f"can't write {self.folder / 'summary.json'}: {error.strerror}; free some "
                    "space and run the same command again: it resumes from the newest checkpoint"
                ) from None
            found = ", ".join(
                f"{name.removeprefix('test_')} {value:.4g}"
                for name, value in values.items()
                if name.startswith("test_")
            )
            log.info("test: %s; more in %s", found, self.folder / "summary.json")

    def __enter__(self) -> "RunLogger":
        return self

    def __exit__(self, _kind: object, failure: BaseException | None, _traceback: object) -> None:
        """End the run in the trackers, and close the files."""
        status: Status = "failed" if failure else self.ending
        error = str(failure).partition("\n")[0] if failure else None
        if failure and not isinstance(failure, UsageError):
            error = f"{type(failure).__name__}: {error}"
        step = self.checkpointing.position.step
        if self.active:
            if best := self.checkpointing.checkpoints.best():
                self.trackers.log("checkpoint", best.absolute(), step)
            with suppress(OSError):
                self.trackers.log("text", "log", read_log(self.folder), step)
            self.status.end(status, error, step)
        self.trackers.finish(status, error)
        if self.active:
            if self.trackers.failed:
                self.status.end(status, error, step, self.trackers.failed)
            self.lines.file.close()
            logging.getLogger().removeHandler(self.log)

    def _write(self, name: str, text: str) -> None:
        write_atomically(self.folder / name, text + "\n")


def pixels(figure: "Figure") -> "np.ndarray":
    """Return the pixels of a figure: uint8, of shape (height, width, 3)."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
