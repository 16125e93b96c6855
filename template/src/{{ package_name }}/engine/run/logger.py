"""What a run leaves behind, and what it shows meanwhile."""

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

QUIET = ("system/", "train/data_seconds")  # metrics that would only clutter the log


class Trackers(Protocol):
    """What the logger calls of the trackers, all together (trackers/dispatch.py)."""

    names: Sequence[str]

    @property
    def failed(self) -> list[str]: ...
    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None: ...
    def log(self, kind: str, *arguments: Any) -> None: ...  # noqa: ANN401
    def flush(self) -> None: ...
    def finish(self, status: Status, error: str | None = None) -> None: ...


class RunLogger:
    """The run folder, the trackers and the progress bar.

    Rank 0 has them all. Other ranks have trackers, for their own numbers, with `track_all_ranks`;
    else every call does nothing on them, so the loop need not ask which rank it is on.

    Args:
        settings: the effective settings, with a run folder.
        world: the ranks.
        start_trackers: takes what trackers are told of the run, and its earlier metrics.
        checkpointing: where this attempt goes on from.
        best: the metric that decides the best checkpoint, and "min" or "max".

    Attributes:
        ending: how the run ends, unless an error ends it.

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
        self.checkpointing = checkpointing
        self.ending: Status = "failed"
        resume_step, lines = checkpointing.resumed_from or 0, checkpointing.line_count
        self.active = world.is_main
        self.folder = Path(str(settings.run_dir))
        facts = world.on_main(lambda: self._open(settings, world, resume_step, lines))
        if self.active:
            self.status.state |= {"best_metric": best[0], "best_direction": best[1]}
            position = checkpointing.position
            if position.best_score is not None:
                self.best(position.best_score, position.best_step)
        run = describe_run(settings, facts, resume_step, world.rank)
        self.trackers = start_trackers(run, self.lines.earlier if self.active else ())

    def _open(
        self, settings: Settings, world: World, resume_step: int, lines: int | None
    ) -> dict[str, Any]:
        facts = provenance.collect(world)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The names of the run's folder, and of those of its experiment and of all runs.
            for folder in list(self.folder.absolute().parents)[:3]:
                with suppress(OSError):  # one may be somebody else's
                    sync_names(folder)
            set_aside_earlier(self.folder, resume_step)
            keep_records(self.folder)
            self._write("config.yaml", yaml.safe_dump(settings.as_dict(), sort_keys=False))
            self._write("provenance.json", json.dumps(facts, indent=2))
            self.lines = JsonLines(self.folder / "metrics.jsonl", resume_step, lines)
            self.log = log_to_file(self.folder / "log.txt")
            with suppress(FileNotFoundError):
                read_bytes(self.folder / "trackers.json")  # fails here if it can't be read
        except OSError as error:
            raise UsageError(
                f"can't write to the run folder {self.folder}: {error.strerror}; choose another "
                "with --run-dir or --run-root"
            ) from None
        self.status = StatusFile(self.folder / "status.json", resume_step)
        return facts

    @property
    def line_count(self) -> int | None:
        """How many lines metrics.jsonl has; None on other ranks than 0."""
        return self.lines.count if self.active else None

    def progress_bar(self, epoch: int, done: int, total: int | None) -> tqdm:
        """Return a bar over an epoch's steps up to max_steps; it is silent in a log file."""
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
            step, progress: where the training is; progress goes from 0 to 1.
            values: over all ranks.
            own: this rank's, which its own run in the trackers gets; rank 0's run gets `values`.
        """
        now = time.time()
        if not self.active:
            self.trackers.log_metrics(own or {}, step, now)
            return
        self.lines.write(step, now, values)
        self.trackers.log_metrics(values, step, now)
        self.status.update(step, progress)
        shown = (f"{name} {value:.5g}" for name, value in values.items() if not quiet(name))
        with tqdm.external_write_mode():
            log.info("step %d  %s", step, "  ".join(shown))

    def best(self, score: float | None, step: int) -> None:
        """Note the best validation so far, for `runs` and sweeps."""
        if self.active:
            self.status.state |= {"best_score": score, "best_step": step}

    def figures(self, step: int, figures: "Mapping[str, Figure]") -> None:
        """Keep pictures as files, and show them to the trackers."""
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
        """Show the trackers how parameters and gradients are distributed; every rank calls this."""
        for name, parameter in parameters.items():
            for what, tensor in (("parameters", parameter), ("gradients", parameter.grad)):
                if tensor is not None:
                    values = full_tensor(tensor.detach())
                    if self.active:
                        array = values.float().cpu().numpy().ravel()
                        self.trackers.log("histogram", f"{what}/{name}", array, step)

    def flush(self) -> None:
        """Make what was recorded so far outlive the process, and metrics.jsonl a power cut.

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
                    f"can't write {self.folder / 'summary.json'}: {error.strerror}; make room, and "
                    "the same command goes on from the newest checkpoint"
                ) from None
            found = {k.removeprefix("test_"): v for k, v in values.items() if k.startswith("test_")}
            log.info(
                "test: %s; all of it in %s",
                ", ".join(f"{name} {value:.4g}" for name, value in found.items()),
                self.folder / "summary.json",
            )

    def __enter__(self) -> "RunLogger":
        return self

    def __exit__(self, _kind: object, failure: BaseException | None, _traceback: object) -> None:
        """End the run in the trackers, and close the files."""
        status: Status = "failed" if failure else self.ending
        error = _in_one_line(failure) if failure else None
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
            self.lines.close()
            logging.getLogger().removeHandler(self.log)

    def _write(self, name: str, text: str) -> None:
        write_atomically(self.folder / name, text + "\n")


def _in_one_line(failure: BaseException) -> str:
    kind = "" if isinstance(failure, UsageError) else f"{type(failure).__name__}: "
    return f"{kind}{failure}".splitlines()[0]


def quiet(name: str) -> bool:
    """Return whether a metric is left out of the log."""
    return name.startswith(QUIET)


def pixels(figure: "Figure") -> "np.ndarray":
    """Return a figure as uint8 of shape (height, width, 3)."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
