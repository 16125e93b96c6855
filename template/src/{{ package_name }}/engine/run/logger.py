"""Writes the run folder, calls the trackers, and shows the progress of a run."""

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from tqdm import tqdm

from ..checkpoint import Checkpointing
from ..config import Settings
from ..errors import LostRankError, UsageError, without_secrets
from ..filesystem import sync_names, write_atomically
from ..ranks.world import World
from . import provenance
from .description import describe_run
from .folder import keep_code, keep_earlier
from .logging_setup import log_to_file, read_log
from .media import as_csv, pixels
from .meters import JsonLines
from .status import Status, StatusFile

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

log = logging.getLogger(__name__)


class RunLogger:
    """Writes the run folder, and calls the trackers. Every rank makes the same calls.

    Args:
        settings: the settings with `run_dir`.
        world: the ranks.
        trackers: a function that starts the trackers, on rank 0: `Trackers` of
            trackers/dispatch.py with their names.
        checkpointing: has the run's position, and the step that this attempt resumes from.
        best: the metric that decides the best checkpoint, and "min" or "max".

    Attributes:
        ending: the status of the run if it ends without an error.

    Raises:
        UsageError: the run folder can't be written to.
    """

    def __init__(
        self,
        settings: Settings,
        world: World,
        trackers: Callable[..., Any],
        checkpointing: Checkpointing,
        best: tuple[str, str],
    ) -> None:
        self.checkpointing, self.active = checkpointing, world.is_main
        self.ending: Status = "failed"
        self.tested: dict[str, float] = {}
        self.folder = Path(str(settings.run_dir))
        position, resume_step = checkpointing.position, checkpointing.resumed_from or 0
        self.status = StatusFile(*best, resume_step, position.best_score, position.best_step)
        world.on_main(lambda: self._open(settings, world, trackers, resume_step))

    def _open(
        self, settings: Settings, world: World, trackers: Callable[..., Any], resume_step: int
    ) -> None:
        """Open the files of the run folder, and start the trackers."""
        facts = provenance.collect(world)
        try:
            # The folders of the run, the experiment and all runs may be new.
            for folder in list(self.folder.absolute().parents)[:3]:
                with suppress(OSError):  # another user may own it
                    sync_names(folder)
            keep_earlier(self.folder, resume_step)
            keep_code(self.folder)
            self._write("config.yaml", yaml.safe_dump(settings.as_dict(), sort_keys=False))
            self._write("provenance.json", json.dumps(facts, indent=2))
            path = self.folder / "metrics.jsonl"
            self.lines = JsonLines(path, resume_step, self.checkpointing.line_count)
            self.log = log_to_file(self.folder / "log.txt")
            self.run = describe_run(settings, facts, resume_step)
            self.trackers = trackers(self.run, self.lines.earlier)
        except OSError as error:
            raise UsageError(
                f"can't write to the run folder {self.folder}: {error.strerror}; choose another "
                "with --run-dir or --run-root"
            ) from None
        self.status.write(self.folder)

    @property
    def line_count(self) -> int | None:
        """The number of lines in metrics.jsonl; None on ranks other than 0."""
        return self.lines.count if self.active else None

    def progress_bar(self, epoch: int, done: int, total: int | None) -> tqdm:
        """Return a progress bar for the steps of an epoch; it is visible only in a terminal.

        Args:
            epoch: its number, from 0.
            done: steps of the epoch taken before.
            total: steps of the epoch, None if unknown.
        """
        return tqdm(
            desc=f"epoch {epoch + 1}",
            initial=done,
            total=total,
            unit="step",
            leave=False,
            disable=not (self.active and sys.stderr.isatty()),
        )

    def metrics(self, progress: float, values: Mapping[str, float]) -> None:
        """Log the metrics of a step, and update status.json; `progress` is from 0 to 1."""
        if self.active:
            self.status.update(self.folder, self.checkpointing.position, progress)
            self.log_numbers(values)

    # Hooks may also use the methods below, down to `log_histogram`. They log to the run folder and
    # to the trackers, at the current step. Any rank may call them, but only rank 0 does something.

    @property
    def step(self) -> int:
        """The number of steps so far."""
        return self.checkpointing.position.step

    def log_numbers(self, values: Mapping[str, float]) -> None:
        """Log numbers by name, and write them to metrics.jsonl.

        In `on_step`, use `record` instead if you want means over steps and ranks.
        """
        if self.active:
            now = time.time()
            self.lines.write(self.step, now, values)
            self.trackers.call("log_metrics", values, self.step, now)
            with tqdm.external_write_mode():
                shown = (x for x in values.items() if not x[0].startswith("system/"))
                log.info("step %d  %s", self.step, "  ".join(f"{k} {v:.5g}" for k, v in shown))

    def log_image(self, name: str, image: "Figure | Tensor") -> None:
        """Write a picture to figures/ as PNG, and send it to the trackers.

        Args:
            name: the same at each step, such as "validation/samples".
            image: a matplotlib figure, or a tensor of shape (height, width) or
                (3, height, width): uint8 from 0 to 255, or float from 0 to 1.
        """
        if self.active:
            from PIL import Image

            array = pixels(image)
            self._keep(name, "png", partial(Image.fromarray(array).save, format="png"))
            self.trackers.call("log_image", name, array, self.step)

    def log_text(self, name: str, text: str) -> None:
        """Log a text, write it to figures/, and send it to the trackers."""
        if self.active:
            for line in text.splitlines():
                log.info("step %d  %s: %s", self.step, name, line)
            self._keep(name, "txt", text)
            self.trackers.call("log_text", name, text, self.step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write a table to figures/ as CSV, and send it to the trackers."""
        if self.active:
            self._keep(name, "csv", as_csv(columns, rows))
            self.trackers.call("log_table", name, columns, rows, self.step)

    def log_histogram(self, name: str, values: "Tensor", step: int | None = None) -> None:
        """Send a histogram of values to the trackers; the step is the current one by default."""
        if self.active:
            array = values.detach().float().cpu().numpy().ravel()
            self.trackers.call("log_histogram", name, array, self.step if step is None else step)

    def _keep(self, name: str, kind: str, content: str | Callable[[Any], object]) -> None:
        path = self.folder / "figures" / f"{name.replace('/', '-')}-{self.step:08}.{kind}"
        try:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, content)
        except OSError as error:
            log.error("could not write %s: %s", path, error.strerror)

    def has_lines(self) -> bool:
        """Return whether the run folder still has the file of metrics; if not, log an error."""
        kept = not self.active or self.lines.is_in_place()
        if not kept:
            log.error(
                "%s was removed or replaced while the run went on: the metrics so far are only in "
                "the output of the job and in the trackers",
                self.lines.file.name,
            )
        return kept

    def flush(self) -> None:
        """Flush the trackers, and write all lines of metrics.jsonl to the disk.

        Raises:
            OSError: a line of metrics.jsonl can't be written.
        """
        if self.active:
            self.trackers.call("flush")
            self.lines.sync()

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json with these values, and log the test metrics.

        Raises:
            UsageError: the file can't be written.
        """
        if not self.active:
            return
        path = self.folder / "summary.json"
        try:
            self._write(path.name, json.dumps(values, indent=2))
        except OSError as error:
            raise UsageError(
                f"can't write {path}: {error.strerror}; free some space and run the same command "
                "again: it resumes from the newest checkpoint"
            ) from None
        self.tested = {name: x for name, x in values.items() if name.startswith("test_")}
        found = (f"{name.removeprefix('test_')} {x:.4g}" for name, x in self.tested.items())
        log.info("test: %s; more in %s", ", ".join(found), path)

    def __enter__(self) -> "RunLogger":
        return self

    def __exit__(self, _kind: object, failure: BaseException | None, _traceback: object) -> None:
        """Write the final status, and end the run in the trackers."""
        if not self.active:
            return
        state, step = self.status, self.checkpointing.position.step
        status: Status = "failed" if failure else self.ending
        if failure:
            state.lost_rank = isinstance(failure, LostRankError)
            state.error = without_secrets(str(failure).partition("\n")[0])
            if not isinstance(failure, UsageError):
                state.error = f"{type(failure).__name__}: {state.error}"
        with suppress(OSError):
            self.trackers.call("log_text", "log", read_log(self.folder), step)
        state.status, state.step = status, step
        state.write(self.folder)
        if missed_by := self.trackers.finish(status, state.error):
            state.missed_by = missed_by
            state.write(self.folder)

    def close(self) -> None:
        """Close the files."""
        if self.active:
            with suppress(OSError):  # the disk may be full
                self.lines.file.close()
            logging.getLogger().removeHandler(self.log)

    def _write(self, name: str, text: str) -> None:
        write_atomically(self.folder / name, text + "\n")
