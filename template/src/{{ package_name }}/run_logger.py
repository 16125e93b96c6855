"""What a run leaves behind, and what it shows meanwhile."""

import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from tqdm import tqdm

from .core.config import Settings
from .core.errors import PrintableFormatter, UsageError
from .core.filesystem import open_regular, read_bytes, set_aside, sync_names, write_atomically
from .core.output import provenance
from .core.output.metrics import JsonLines
from .core.output.run_lock import newest
from .core.output.status import Status, StatusFile
from .core.ranks.dtensor import full_tensor
from .core.ranks.environment import srun_step
from .core.ranks.world import World
from .core.training.checkpoint import Checkpointing, Checkpoints
from .tracking import Run
from .tracking.dispatch import Trackers, known_ids, without_secrets

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from torch import nn

log = logging.getLogger(__name__)

Own = TypeVar("Own", bound=Settings)

QUIET = ("system/", "train/data_seconds")  # metrics that would only clutter the log


def with_run_dir(settings: Own, world: World) -> Own:
    """Return the settings with a run folder; every rank calls this and gets the same one.

    A requeued job keeps its id, and so finds its folder again. Each task of an array is a run of
    its own.

    Raises:
        UsageError: all tasks of an array are told to use one folder.
    """
    if settings.run_dir:
        # A sweep gives each trial a folder of its own, whichever task of an array runs it.
        alone = "SWEEP_TRIAL" in os.environ
        if int(os.environ.get("SLURM_ARRAY_TASK_COUNT", 1)) > 1 and not alone:
            raise UsageError(
                f"run_dir is {settings.run_dir}, but each task of an array is a run of its own: "
                "leave --run-dir out, and use --experiment to keep the runs together"
            )
        return settings
    now = time.time()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    # Milliseconds: two runs that a loop starts must not share a folder.
    name = os.environ.get("SLURM_JOB_ID", f"{stamp}-{int(now * 1000) % 1000:03}")
    if step := srun_step(os.environ):
        # The second training in one allocation; a requeued job counts its steps from zero again.
        name += f".{step}"
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        name = "{SLURM_ARRAY_JOB_ID}_{SLURM_ARRAY_TASK_ID}".format_map(os.environ)
    folder = Path(settings.run_root, settings.experiment, world.broadcast(name))
    return dataclasses.replace(settings, run_dir=str(folder))


class RunLogger:
    """The run folder, the trackers and the progress bar.

    Rank 0 has them all. Other ranks have trackers, for their own numbers, with `track_all_ranks`;
    else every call does nothing on them, so the loop need not ask which rank it is on.

    Args:
        settings: the effective settings, with a run folder.
        world: the ranks.
        trackers: names of the trackers to use.
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
        trackers: list[str],
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
        run = described(settings, facts, resume_step, world.rank)
        tracked = trackers if self.active or settings.track_all_ranks else []
        self.trackers = Trackers(tracked, run, self.lines.earlier if self.active else ())

    def _open(
        self, settings: Settings, world: World, resume_step: int, lines: int | None
    ) -> dict[str, Any]:
        facts = provenance.collect(world, without_secrets)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # The names of the run's folder, and of those of its experiment and of all runs.
            for folder in list(self.folder.absolute().parents)[:3]:
                with suppress(OSError):  # one may be somebody else's
                    sync_names(folder)
            self._set_aside(resume_step)
            self._keep_records()
            self._write("config.yaml", yaml.safe_dump(settings.as_dict(), sort_keys=False))
            self._write("provenance.json", json.dumps(facts, indent=2))
            self.lines = JsonLines(self.folder / "metrics.jsonl", resume_step, lines)
            self.log = log_to(self.folder / "log.txt")
            known_ids(self.folder, 0)  # fails here, if it can't be read
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

    def _set_aside(self, resume_step: int) -> None:
        """Move away what this run would replace, or what a later one would wrongly go on from."""
        left = Checkpoints(self.folder / "checkpoints").newer(resume_step)
        if resume_step == 0:
            left += [
                path
                for name in ("metrics.jsonl", "summary.json")
                if (path := self.folder / name).exists() and path.stat().st_size
            ]
        if left and resume_step == 0:
            described = (self.folder / name for name in ("config.yaml", "provenance.json"))
            left += [path for path in described if path.exists()]
        if left:
            log.warning(
                "moved what an earlier run had left in %s to %s",
                self.folder,
                set_aside(left, self.folder).name,
            )

    def _keep_records(self) -> None:
        """Keep what the attempt before wrote of itself, as this one will replace it."""
        attempts = self.folder / "attempts"
        for name in ("config.yaml", "provenance.json"):
            if (path := self.folder / name).exists():
                kept = attempts / f"{newest(attempts) - 1}-{name}"
                write_atomically(kept, path.read_bytes())

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
            if self.trackers.threads:
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
                self.trackers.log("text", "log", log_of(self.folder), step)
            self.status.end(status, error, step)
        self.trackers.finish(status, error)
        if self.active:
            if self.trackers.failed:
                self.status.end(status, error, step, self.trackers.failed)
            self.lines.close()
            logging.getLogger().removeHandler(self.log)

    def _write(self, name: str, text: str) -> None:
        write_atomically(self.folder / name, text + "\n")


def described(settings: Settings, facts: Mapping[str, Any], resume_step: int, rank: int = 0) -> Run:
    """Return what trackers are told of a run."""
    folder = Path(str(settings.run_dir)).absolute()
    name = f"{settings.experiment}/{folder.name}"
    return Run(
        directory=folder,
        store=Path(settings.run_root, settings.experiment).absolute(),
        name=f"{name}/rank{rank}" if rank else name,
        experiment=settings.experiment,
        settings=settings.as_dict(),
        provenance=facts,
        tags=settings.tags,
        resume_step=resume_step,
        rank=rank,
    )


def _in_one_line(failure: BaseException) -> str:
    kind = "" if isinstance(failure, UsageError) else f"{type(failure).__name__}: "
    return f"{kind}{failure}".splitlines()[0]


def log_to(path: Path) -> logging.Handler:
    """Append what is logged to a file, too, and what was logged before; a full disk loses some.

    Raises:
        OSError: it can't be written, as `open_regular` says.
    """
    file = logging.StreamHandler(open_regular(path, "a"))
    file.setFormatter(PrintableFormatter("%(asctime)s %(message)s"))
    file.handleError = lambda record: None  # type: ignore[method-assign]
    (memory,) = (each for each in logging.getLogger().handlers if isinstance(each, MemoryHandler))
    memory.setTarget(file)
    memory.flush()
    return memory


def log_of(folder: Path) -> str:
    """Return what is in log.txt; of a very long one, the end.

    Raises:
        OSError: it can't be read, as `open_regular` says.
    """
    return read_bytes(folder / "log.txt", 2**22, last=True).decode(errors="replace")


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
