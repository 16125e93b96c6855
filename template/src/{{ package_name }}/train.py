"""The training loop."""

import logging
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from . import data
from .core.errors import UsageError
from .core.filesystem import read_object
from .core.loading.batches import TrainBatches
from .core.loading.seeds import seed_torch
from .core.loading.steps import Loaded, StepLoader, sizes
from .core.nested import to_device
from .core.output import run_lock
from .core.output.log import log_data_wait, log_start, set_up_logging
from .core.output.metrics import Meter
from .core.output.record import STORE
from .core.ranks.consistency import refuse_different_samples, refuse_different_settings
from .core.ranks.process_group import joined, lost_ranks_named
from .core.ranks.signals import EXIT_CODE, StopRequest
from .core.ranks.step_totals import StepTotals
from .core.ranks.world import World
from .core.training.checkpointing import Checkpointing
from .core.training.checks import checked_weight
from .core.training.networks import Networks, named_parameters
from .core.training.schedule import scaling
from .core.training.update import Loop, Weighted
from .evaluate import Evaluator
from .finish import finish
from .learner import Learner, model_class
from .run_logger import RunLogger, with_run_dir
from .settings import Settings
from .tracking import select

log = logging.getLogger(__name__)


def run(settings: Settings, stop: StopRequest) -> int:
    """Train as the settings say; every rank calls this.

    Returns:
        The process's exit code: 0, or 75 when a signal stopped the run after a checkpoint.

    Raises:
        UsageError: the settings do not fit the world, the machine or the data.
    """
    trackers = select(settings.trackers)
    make = model_class()
    with joined(settings) as world:
        set_up_logging(world, settings.log_all_ranks)
        refuse_different_settings(settings, world)
        settings = with_run_dir(settings.for_world(world.size), world)
        with run_lock.held(settings, world):
            return Trainer(make(settings), settings, world, stop).train(trackers)


class Trainer:
    """A learner's networks, its data, and how far the ones are trained on the other."""

    def __init__(
        self, learner: Learner, settings: Settings, world: World, stop: StopRequest
    ) -> None:
        self.learner, self.settings, self.world, self.stop = learner, settings, world, stop
        self.datasets = data.load(settings)
        self.batches = TrainBatches(
            self.datasets.train,
            settings.batch_size,
            world.rank,
            world.size,
            settings.seed,
            settings.workers,
            pin=world.device.type == "cuda",
        )
        weighs = type(learner).weigh is not Learner.weigh
        weigh = partial(checked_weight, learner) if weighs else None
        self.loader = StepLoader(
            self.batches, settings.accumulate, weigh, settings.seed, world.rank
        )
        self.samples_per_step = settings.batch_size * settings.accumulate * world.size
        refuse_different_samples("training", self.batches.samples, world)
        for name, dataset in (
            ("validation", self.datasets.validation),
            ("test", self.datasets.test),
        ):
            refuse_different_samples(name, len(dataset), world)  # type: ignore[arg-type]
        if not self.batches.samples and not settings.max_steps:
            raise UsageError("the training set does not say its length: set --max-steps")
        torch.manual_seed(settings.seed)
        self.networks = Networks(learner, settings, world)
        self.evaluator = Evaluator(learner, self.networks, settings, world)
        self.meter = Meter(world.device, learner.unit)
        self.loop = Loop(self.networks, settings, world, self.meter, self._show_histograms)
        self.checkpointing = Checkpointing(
            self.networks, self.meter, settings, world, self.samples_per_step
        )
        self.position = self.checkpointing.position
        self.data_wait_logged = settings.workers > 0

    def train(self, trackers: list[str]) -> int:
        """Train to the end or to a signal; return the process's exit code."""
        settings, world, checkpointing = self.settings, self.world, self.checkpointing
        log_start(settings, world, self.batches.samples, self.samples_per_step)
        if settings.dry_run:
            return 0
        resumed = checkpointing.resumed_from or 0
        finished = world.broadcast(_is_summed_up(checkpointing.run_dir, self.position.step))
        if resumed and finished and self.position.is_end(settings):
            log.info("nothing is left to do: this run has finished; --run-dir chooses another")
            return 0
        self.evaluator.check(self.datasets.validation)
        self.logger = RunLogger(
            settings, world, trackers, resumed, checkpointing.line_count, self.learner.best
        )
        status: Literal["finished", "failed", "preempted"] = "failed"
        error: str | None = None
        try:
            with checkpointing.saver, lost_ranks_named(world.rank, settings.timeout):
                stopped = False
                while not self.position.is_end(settings) and not stopped:
                    stopped = not self._train_epoch()
                if not stopped:
                    self._validate()
                    finish(self)
            status = "preempted" if stopped else "finished"
        except BaseException as failure:
            kind = "" if isinstance(failure, UsageError) else f"{type(failure).__name__}: "
            error = f"{kind}{failure}".splitlines()[0]
            raise
        finally:
            self.batches.close()
            self.logger.close(status, error, self.position.step, checkpointing.checkpoints.best())
        return EXIT_CODE if stopped else 0

    def _train_epoch(self) -> bool:
        """Train to the end of the epoch, evaluate and save; return False if a signal came first."""
        position, settings, began = self.position, self.settings, time.perf_counter()
        length = (self.batches.samples or 0) // self.samples_per_step
        bar = self.logger.progress_bar(position.epoch, position.epoch_steps, length or None)
        steps = self.loader.epoch(
            position.epoch, position.step, position.consumed, position.epoch_steps
        )
        totals = StepTotals(self.world, self.stop, position.step, self.loader.uneven)
        loaded = self._next(steps)
        totals.begin(position.step, *sizes(loaded))
        stopping, samples = False, 1
        while not position.is_end(settings):
            stopping, samples, weight = totals.result()
            if stopping or samples == 0:
                break
            if _is_due(settings.validate_every, position.step):
                self._validate()
                if position.is_end(settings):
                    break
            # The next step's totals are summed while this step is computed.
            following = self._next(steps)
            totals.begin(position.step, *sizes(following))
            self._train_step(loaded, samples, weight)
            loaded = following
            bar.update()
            if _is_due(settings.log_every, position.step):
                self._log_step()
            if _is_due(settings.checkpoint_every, position.step) and not position.is_end(settings):
                self._save()
        totals.result()  # of the step behind max_steps: ranks must hear it before they talk again
        bar.close()
        self.meter.trained_seconds += time.perf_counter() - began
        if stopping:
            self._stop()
        elif samples == 0:
            self._end_epoch()
        return not stopping

    def _next(self, steps: Iterator[list[Loaded]]) -> list[Loaded]:
        """Return the next step's batches, and record how long they were waited for."""
        loaded = next(steps)
        STORE.add("train/data_seconds", self.loader.waited, 1)
        return loaded

    def _train_step(self, loaded: list[Loaded], samples: int, weight: int) -> None:
        """Take one step.

        Args:
            loaded: this rank's batches.
            samples, weight: of all ranks together.
        """
        settings, position = self.settings, self.position
        factor = scaling(settings, self.samples_per_step) * self.learner.schedule(self.progress())
        self.networks.set_learning_rates(factor)
        seed_torch("step", settings.seed, self.world.rank, position.step)
        self.loop.begin(
            [
                Weighted(to_device(each.batch, self.world.device), each.weight)
                for each in self.loader.filled(loaded)
            ],
            weight,
            measure_norm=_is_due(settings.log_every, position.step + 1),
        )
        self.learner.train_step(self.loop)
        position.advance(samples)
        if self.networks.average:
            self.networks.average.update(self.networks.modules, position.step)
        self.meter.count(samples, weight)

    def progress(self) -> float:
        """Return how much of the training is done, from 0 to 1."""
        return self.position.progress(self.settings, self.batches.samples, self.samples_per_step)

    def _log_step(self) -> None:
        readings, own = self.meter.read(self.world)
        for name in self.meter.losses:
            self.checkpointing.refuse_divergence(f"{name} is", readings[name])
        if not self.data_wait_logged and self.position.step > self.settings.log_every:
            self.data_wait_logged = log_data_wait(
                readings["train/data_seconds"], self.meter.step_seconds
            )
        rates = self.networks.learning_rates()
        self.logger.metrics(self.position.step, self.progress(), readings | rates, own | rates)

    def _show_histograms(self) -> None:
        if _is_due(self.settings.histograms_every, self.position.step + 1):
            parameters = named_parameters(self.networks.modules)
            self.logger.histograms(self.position.step + 1, parameters)

    def _end_epoch(self) -> None:
        """Begin the next epoch, after an evaluation where one is due."""
        if self.position.step == 0:
            raise UsageError("the training set has no samples: is data_dir the right folder?")
        if _is_due(self.settings.validate_epochs, self.position.epoch + 1):
            self._validate(epoch_ends=True)
        else:
            self.position.end_epoch()
            self._save()

    def _validate(self, epoch_ends: bool = False) -> None:
        """Evaluate on the validation set and save, unless that was done at this step already."""
        position, began = self.position, time.perf_counter()
        name, direction = self.learner.best
        line: dict[str, float] = {}
        best = False
        if position.validated_step != position.step or position.best_score is None:
            # First of all: a signal in a long validation then costs no more than the validation.
            self._save()
            found = self.evaluator.evaluate(self.datasets.validation, "validation", position.step)
            line = found.metrics
        if epoch_ends:
            position.end_epoch()
        elif not line:
            return
        if line:
            self.checkpointing.refuse_divergence(f"{name} is", line[name])
            best = position.judge(line[name], direction)
        line = {"epoch": position.epoch, **line}
        self.logger.metrics(position.step, self.progress(), line)
        self.logger.best(position.best_score, position.best_step)
        self._save(best)
        if position.is_out_of_patience(self.settings):
            log.info(
                "no better for %d validations: the training ends at step %d, its best was step %d",
                position.validations_since_best,
                position.step,
                position.best_step,
            )
        self.meter.skip(time.perf_counter() - began)

    def _save(self, best: bool = False) -> None:
        """Save a checkpoint in the background; every rank calls this."""
        self.checkpointing.save(self.logger.line_count, self.logger.flush, best)

    def _stop(self) -> None:
        """Save, since a signal came."""
        self._save()
        self.checkpointing.refuse_unsaved("stopped")
        log.info(
            "stopped at step %d by %s; the same command with --run-dir %s goes on from there",
            self.position.step,
            self.stop.received or "a signal to another rank",
            self.checkpointing.run_dir,
        )


def _is_summed_up(run_dir: Path, step: int) -> bool:
    """Return whether summary.json is of this step, and not of one before the run was prolonged."""
    try:
        return read_object(run_dir / "summary.json", {}).get("global_step") == step
    except (OSError, ValueError):
        return False


def _is_due(every: int, step: int) -> bool:
    """Return whether a step is one of those; 0 means none."""
    return every > 0 and step > 0 and step % every == 0
