"""The training loop."""

import logging
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import data
from .core.checkpoint import restore
from .core.checkpoint.store import Checkpoints
from .core.checkpoint.writer import Saver
from .core.config import Settings
from .core.errors import UsageError
from .core.loading.batches import TrainBatches
from .core.loading.seeds import seed_torch
from .core.nested import to_device
from .core.output import run_lock
from .core.output.log import log_data_wait, log_resume, log_start, set_up_logging
from .core.output.metrics import Meter
from .core.output.record import record
from .core.output.status import Status
from .core.ranks.consistency import refuse_different_samples, refuse_different_settings
from .core.ranks.process_group import joined, lost_ranks_named
from .core.ranks.signals import EXIT_CODE, StopRequest
from .core.ranks.step_totals import StepTotals
from .core.ranks.strategy import parameter_norm
from .core.ranks.world import World
from .core.training.checks import checked_weight
from .core.training.networks import Networks, digest, named_parameters
from .core.training.position import Position
from .core.training.schedule import scaling
from .core.training.update import Loop, Weighted
from .evaluate import Evaluation, Evaluator
from .learner import Learner, model_class
from .run_logger import RunLogger, with_run_dir
from .tracking import select

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A batch of this rank: its number of samples, and how much it counts in means."""

    batch: Any
    samples: int
    weight: int


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
        self.position = Position()
        self.resumed_from: int | None = None
        self.line_count: int | None = None
        self.trained_samples, self.trained_weight, self.trained_seconds = 0, 0, 0.0
        self.waiting_announced = settings.workers > 0
        self.weighs = type(learner).weigh is not Learner.weigh

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
        self.samples_per_step = settings.batch_size * settings.accumulate * world.size
        refuse_different_samples("training", self.batches.samples, world)
        refuse_different_samples("validation", len(self.datasets.validation), world)
        refuse_different_samples("test", len(self.datasets.test), world)
        if not self.batches.samples and not settings.max_steps:
            raise UsageError("the training set does not say its length: set --max-steps")

        torch.manual_seed(settings.seed)
        self.networks = Networks(learner, settings, world)
        self.evaluator = Evaluator(learner, self.networks, settings, world)
        self.meter = Meter(world.device, learner.unit)
        self.loop = Loop(self.networks, settings, world, self.meter, self._show_histograms)
        self.run_dir = Path(str(settings.run_dir))
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", settings.keep_checkpoints)
        self.saver = Saver(self.checkpoints, world, settings.timeout)
        self._resume()

    def train(self, trackers: list[str]) -> int:
        """Train to the end or to a signal; return the process's exit code."""
        log_start(self.settings, self.world, self.batches.samples, self.samples_per_step)
        if self.settings.dry_run:
            return 0
        if self.resumed_from and self._is_end() and self.world.broadcast(self._has_summary()):
            log.info("nothing is left to do: this run has finished; --run-dir chooses another")
            return 0
        self.evaluator.check(self.datasets.validation)
        self.report = RunLogger(
            self.settings,
            self.world,
            trackers,
            self.resumed_from or 0,
            self.line_count,
            self.learner.best,
        )
        status: Status = "failed"
        error: str | None = None
        try:
            with self.saver, lost_ranks_named(self.world.rank, self.settings.timeout):
                stopped = False
                while not self._is_end() and not stopped:
                    stopped = not self._train_epoch()
                if not stopped:
                    self._validate()
                    self._summarize()
            status = "preempted" if stopped else "finished"
        except BaseException as failure:
            kind = "" if isinstance(failure, UsageError) else f"{type(failure).__name__}: "
            error = f"{kind}{failure}".splitlines()[0]
            raise
        finally:
            self.batches.close()
            self.report.close(status, error, self.position.step, self.checkpoints.best())
        return EXIT_CODE if stopped else 0

    # -- steps ------------------------------------------------------------------------------------

    def _train_epoch(self) -> bool:
        """Train to the end of the epoch, evaluate and save; return False if a signal came first."""
        position, settings = self.position, self.settings
        steps = (self.batches.samples or 0) // self.samples_per_step
        bar = self.report.progress_bar(position.epoch, position.epoch_steps, steps or None)
        windows = self._windows()
        window = self._next(windows)
        votes = StepTotals(self.world, self.stop, position.step, self.batches.uneven or self.weighs)
        votes.begin(position.step, *_sizes(window))
        began = time.perf_counter()
        stopping, samples = False, 1
        while not position.is_end(settings):
            stopping, samples, weight = votes.result()
            if stopping or samples == 0:
                break
            if self._is_due(settings.validate_every, position.step):
                self._validate()
                if position.is_end(settings):
                    break
            # The next step's vote travels while this step is computed.
            following = self._next(windows)
            votes.begin(position.step, *_sizes(following))
            self._train_step(window, samples, weight)
            window = following
            bar.update()
            if self._is_due(settings.log_every, position.step):
                self._log_step()
            if self._is_due(settings.checkpoint_every, position.step) and not self._is_end():
                self._save()
        votes.result()  # of the step behind max_steps: ranks must hear it before they talk again
        bar.close()
        self.trained_seconds += time.perf_counter() - began
        if stopping:
            self._leave()
            return False
        if samples == 0:
            if position.step == 0:
                raise UsageError("the training set has no samples: is data_dir the right folder?")
            self._end_epoch()
        return True

    def _windows(self) -> Iterator[list[Loaded]]:
        """Yield this rank's batches for each step that is left of the epoch, then empty lists."""
        position, accumulate = self.position, self.settings.accumulate
        batches = self.batches.epoch(
            position.epoch, position.consumed, position.epoch_steps * accumulate
        )
        step = position.step
        while True:
            seed_torch("samples", self.settings.seed, self.world.rank, step)
            window = []
            for samples, batch in islice(batches, accumulate):
                weight = checked_weight(self.learner, batch) if self.weighs else samples
                window.append(Loaded(batch, samples, weight))
            yield window
            step += 1

    def _next(self, windows: Iterator[list[Loaded]]) -> list[Loaded]:
        """Return the next step's batches, and take note of how long they were waited for."""
        began = time.perf_counter()
        window = next(windows)
        record("train/data_seconds", time.perf_counter() - began)
        return window

    def _train_step(self, window: list[Loaded], samples: int, weight: int) -> None:
        """Take one step.

        Args:
            window: this rank's batches. A rank that has none left, since its shards were shorter,
                takes part with weight zero, so that the others need not stop: in each forward
                and backward pass, at which ranks may meet.
            samples, weight: of all ranks together.
        """
        settings, position = self.settings, self.position
        self.networks.set_learning_rates(self._learning_rate_factor())
        seed_torch("step", settings.seed, self.world.rank, position.step)
        if self.batches.uneven:
            spare = Loaded(self.batches.last, 0, 0)
            window = window + [spare] * (settings.accumulate - len(window))
        self.loop.begin(
            [Weighted(to_device(each.batch, self.world.device), each.weight) for each in window],
            weight,
            measure_norm=self._is_due(settings.log_every, position.step + 1),
        )
        self.learner.train_step(self.loop)
        position.advance(samples)
        if self.networks.average:
            self.networks.average.update(self.networks.modules, position.step)
        self.trained_samples += samples
        self.trained_weight += weight
        self.meter.count(weight)

    def _log_step(self) -> None:
        readings, own = self.meter.read(self.world)
        for name in self.meter.losses:
            self._refuse_divergence(f"{name} is", readings[name])
        if not self.waiting_announced and self.position.step > self.settings.log_every:
            self.waiting_announced = log_data_wait(
                readings["train/data_seconds"], self.meter.step_seconds
            )
        rates = self.networks.learning_rates()
        self.report.metrics(self.position.step, self.progress(), readings | rates, own | rates)

    def _show_histograms(self) -> None:
        if self._is_due(self.settings.histograms_every, self.position.step + 1):
            parameters = named_parameters(self.networks.modules)
            self.report.histograms(self.position.step + 1, parameters)

    # -- evaluations ------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        """Begin the next epoch, after an evaluation where one is due."""
        every = self.settings.validate_epochs
        if every and (self.position.epoch + 1) % every == 0:
            self._validate(epoch_ends=True)
        else:
            self.position.end_epoch()
            self._save()

    def _validate(self, epoch_ends: bool = False) -> None:
        """Evaluate on the validation set and save, unless that was done at this step already."""
        position, began = self.position, time.perf_counter()
        result = None
        if position.validated_step != position.step or position.best_score is None:
            # First of all: a signal in a long validation then costs no more than the validation.
            self._save()
            result = self.evaluator.evaluate(self.datasets.validation, "validation", position.step)
        if epoch_ends:
            position.end_epoch()
        elif result is None:
            return
        line: dict[str, float] = {"epoch": position.epoch}
        best = False
        if result:
            name, direction = self.learner.best
            self._refuse_divergence(f"{name} is", result.metrics[name])
            best = position.judge(result.metrics[name], direction)
            line |= result.metrics
        self.report.metrics(position.step, self.progress(), line)
        self.report.best(position.best_score, position.best_step)
        self._save(best)
        if position.is_out_of_patience(self.settings):
            log.info(
                "no better for %d validations: the training ends at step %d, its best was step %d",
                position.validations_since_best,
                position.step,
                position.best_step,
            )
        self.meter.skip(time.perf_counter() - began)

    def _summarize(self) -> None:
        position, name = self.position, self.learner.best[0]
        test = self.evaluator.evaluate(self.datasets.test, "test", position.step, keep_first=True)
        self._refuse_unsaved("ended")
        self.report.metrics(position.step, 1.0, test.metrics)
        seconds = max(self.trained_seconds, 1e-9)
        rates = {
            "samples_per_second": self.trained_samples / seconds,
            f"{self.learner.unit}_per_second": self.trained_weight / seconds,
        }
        self.report.summary(
            {
                **{metric.replace("/", "_"): value for metric, value in test.metrics.items()},
                name.replace("/", "_"): position.best_score,
                "best_step": position.best_step,
                "epochs": position.epoch,
                "global_step": position.step,
                "world_size": self.world.size,
                "backend": self.world.backend,
                "device": str(self.world.device),
                "hostnames": list(self.world.hostnames),
                **rates,
                "trained_seconds": self.trained_seconds,
                "resumed_from_step": self.resumed_from,
                "parameters_sha256": digest(self.networks.modules),
            }
        )
        self._draw(test)
        if self.settings.register_model and self.world.is_main:
            self._register(self.settings.register_model)

    def _draw(self, test: Evaluation) -> None:
        """Keep the figures of figures.py; a mistake in that file costs the figures only."""
        if not self.world.is_main or test.first is None:
            return
        try:
            from . import figures

            drawn = figures.draw(test.sums, *test.first)
        except Exception:
            log.exception("figures.py failed, so there are no figures of this evaluation")
            return
        self.report.figures(
            self.position.step, {f"test/{name}": figure for name, figure in drawn.items()}
        )

    def _register(self, name: str) -> None:
        """Put the best network into the registry of models."""
        from .inference import load

        self.saver.wait()
        best = self.checkpoints.best()
        if best is None:
            log.error("there is no checkpoint, so no network goes into the registry")
            return
        loaded = load(best, self.settings)
        example = loaded.learner.inputs(loaded.example(self.datasets.test, 4))
        self.report.trackers.log("model", loaded.networks, example, name, loaded.step)

    # -- where the training stands ----------------------------------------------------------------

    def progress(self) -> float:
        """Return how much of the training is done, from 0 to 1."""
        return self.position.progress(self.settings, self.batches.samples, self.samples_per_step)

    def _learning_rate_factor(self) -> float:
        """Return what the learning rates of the step to come are multiplied by."""
        return scaling(self.settings, self.samples_per_step) * self.learner.schedule(
            self.progress()
        )

    def _is_end(self) -> bool:
        return self.position.is_end(self.settings)

    def _has_summary(self) -> bool:
        return (self.run_dir / "summary.json").exists()

    @staticmethod
    def _is_due(every: int, step: int) -> bool:
        """Return whether a step is one of those; 0 means none."""
        return every > 0 and step > 0 and step % every == 0

    def _leave(self) -> None:
        """Save, since a signal came."""
        self._save()
        self._refuse_unsaved("stopped")
        log.info(
            "stopped at step %d by %s; the same command with --run-dir %s goes on from there",
            self.position.step,
            self.stop.received or "a signal to another rank",
            self.run_dir,
        )

    def _refuse_divergence(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            self.saver.wait()
            newest = self.checkpoints.latest() or "none had been saved yet"
            raise UsageError(
                f"{what} {value} at step {self.position.step}: lower lr, lengthen warmup, or set "
                f"clip_norm; the last checkpoint from before: {newest}"
            )

    def _refuse_unsaved(self, what: str) -> None:
        if not self.world.broadcast(self.saver.wait()):
            raise UsageError(
                f"{what} at step {self.position.step}, but the checkpoint could not be written: "
                f"make room for {self.checkpoints.folder}; the same command then goes on from the "
                "checkpoint before, if there is one"
            )

    def _save(self, best: bool = False) -> None:
        """Save everything that a resumed run needs; every rank calls this.

        Random generators are not in it: they are seeded with each step's number.

        Raises:
            UsageError: on every rank, if a network has diverged: the checkpoints from before are
                worth more than this one.
        """
        norm = parameter_norm(self.networks.modules.values()).item()
        self._refuse_divergence("the norm of all parameters is", norm)
        state: dict[str, Any] = {
            **self.networks.state(),
            "position": self.position.as_dict(),
            "meter": self.meter.state(self.world),
            "line_count": self.report.line_count,
            "world_size": self.world.size,
            "samples_per_step": self.samples_per_step,
            "settings": self.settings.as_dict(),
        }
        self.saver.save(state, self.position.step, best, before=self.report.flush)

    def _resume(self) -> None:
        """Go on from the checkpoint that the settings lead to, if there is one."""
        found = restore.load_first(
            restore.candidates(self.settings.resume, self.run_dir), self.networks.like, self.world
        )
        if found is None:
            return
        path, state = found
        try:
            self.networks.load(state)
            self.position = Position.from_dict(state["position"])
            if state["samples_per_step"] != self.samples_per_step:
                # The batches that each rank would have had by now.
                self.position.epoch_steps = self.position.consumed // self.samples_per_step
            self.meter.resume(state["meter"], self.world)
            self.line_count = state["line_count"]
            log_resume(path, state, self.settings, self.world)
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"{path} does not fit model.py ({str(error).split(chr(9))[-1]}): choose another "
                "--run-dir, or bring back the model that it was saved from"
            ) from None
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{path} was not saved by this version of the project ({type(error).__name__}: "
                f"{error}): choose another --run-dir, or bring back the version that saved it"
            ) from None
        self.resumed_from = self.position.step
        self.saver.go_on_from(path, self.position.step)


def _sizes(window: list[Loaded]) -> tuple[int, int]:
    """Return the samples and the weight of a step's batches."""
    return sum(each.samples for each in window), sum(each.weight for each in window)
