"""The training loop, in the order of a run: epochs, steps, validations, and the end."""

import logging
import os
from contextlib import closing, nullcontext
from functools import partial
from typing import Any

import torch

from . import data
from .engine.checkpoint import Checkpointing
from .engine.checks import (
    check_datasets,
    check_loaded,
    check_pretrained,
    check_same_settings,
    import_tool,
    rehearsed,
)
from .engine.data.seeds import derive, seed_generators
from .engine.data.steps import Loaded, StepLoader
from .engine.errors import UsageError
from .engine.evaluate import Evaluation, Evaluator
from .engine.filesystem import read_object
from .engine.hooks import Hooks
from .engine.inference import described
from .engine.networks import Networks, digest, named_parameters
from .engine.position import Position, is_due
from .engine.ranks.process_group import joined, lost_ranks_explained
from .engine.ranks.signals import EXIT_CODE, StopRequest
from .engine.ranks.step_totals import StepTotals
from .engine.ranks.world import World
from .engine.run import run_lock
from .engine.run.clock import CLOCK
from .engine.run.folder import with_run_dir
from .engine.run.logger import RunLogger
from .engine.run.logging_setup import set_up_logging
from .engine.run.media import pixels
from .engine.run.messages import log_start
from .engine.run.meters import Meter
from .engine.run.record import LOSS
from .engine.schedule import scaling
from .engine.updater import Updater
from .learner import Learner, model_class
from .settings import Settings
from .trackers import select
from .trackers.dispatch import Trackers

log = logging.getLogger(__name__)


def run(settings: Settings, request: StopRequest) -> int:
    """Train with these settings. Every rank calls this function.

    Returns the exit code of the process: 0, or 75 if a signal stopped the run and a checkpoint was
    saved. A Slurm job that exits with 75 is requeued (slurm/resume.sh).
    """
    trackers = select(settings.trackers)
    make = model_class()
    with joined(settings) as world:
        set_up_logging(world, settings.log_all_ranks)
        check_same_settings(settings, world)
        settings = with_run_dir(settings.for_world(world.size), world)
        with run_lock.own_run_folder(settings, world):
            return Trainer(make(settings), settings, world, request).train(trackers)


class Trainer:
    """Trains the networks of a learner until the end of the run or a stop request.

    Args:
        learner: the model to train.
        settings: of the run; `run_dir` is set.
        world: this rank and the others.
        request: records a signal that asks the run to stop.
    """

    def __init__(
        self, learner: Learner, settings: Settings, world: World, request: StopRequest
    ) -> None:
        self.learner, self.settings, self.world, self.request = learner, settings, world, request
        self.profiler = None
        if settings.profile:
            self.profiler = import_tool("profile", "profile").Profiler(self)
        self.meter, self.learner_step = Meter(world.device, learner.unit), learner.train_step
        if settings.count_flops:
            meter = import_tool("flops", "count_flops").FlopMeter(learner.unit, settings, world)
            self.meter, self.learner_step = meter, meter.counted(learner.train_step)
        self.datasets = check_loaded(data.load(settings))
        weigh = learner.batch_weight if self._overrides("batch_weight") else None
        self.loader = StepLoader(self.datasets.train, settings, world, weigh)
        self.samples_per_step = settings.batch_size * settings.accumulate * world.size
        check_datasets(self.datasets, self.loader.samples, settings, world)
        torch.manual_seed(settings.seed)
        self.networks = Networks(
            learner.build(), learner.optimizers, learner.fsdp_units, settings, world
        )
        self.evaluator = Evaluator(learner, self.networks, settings, world)
        self.updater = Updater(self.networks, settings, world, self._show_histograms)
        self.checkpointing = Checkpointing(
            self.networks, self.meter, settings, world, self.samples_per_step
        )
        self.position = self.checkpointing.position

    def train(self, trackers: list[str]) -> int:
        """Train until the end of the run or a signal; return the exit code of the process."""
        settings, world, checkpointing = self.settings, self.world, self.checkpointing
        log_start(settings, world, self.loader, self.samples_per_step)
        if settings.resume != "never" and (end := world.on_main(self._finished_step)):
            log.info(
                "nothing is left to do: summary.json says that this run has finished at step %d; "
                "choose another --run-dir, or larger --epochs, --max-steps or --patience",
                end,
            )
            return 0
        self._check()
        if settings.dry_run:
            log.info("dry run: samples were evaluated, predicted and drawn; no step was taken")
            return 0
        self.logger = RunLogger(
            settings, world, partial(Trackers, trackers), checkpointing, self.learner.best
        )
        self.hooks = Hooks(self)
        with (
            closing(self.meter.machine),
            self.logger,
            closing(self.loader),
            checkpointing,
            lost_ranks_explained(world.rank),
        ):
            try:
                self.hooks.call("on_start")
                CLOCK.switch("steps")
                with self.profiler or nullcontext():
                    while not self.position.is_end(settings):
                        if not self._train_epoch():
                            self.logger.ending = "preempted"
                            return EXIT_CODE
                    self.validate()
                code = self.finish()
            except BaseException as error:
                if world.is_main:
                    self.hooks.end("failed", error)
                raise
            self.logger.ending = "finished"
        return code

    def _overrides(self, name: str) -> bool:
        return getattr(type(self.learner), name) is not getattr(Learner, name)

    def _check(self) -> None:
        """Call what the run needs only at its end, to find mistakes before the first step.

        Only a first start and a dry run draw figures: importing matplotlib takes half a second.
        """
        test, (batch, outputs) = self.evaluator.check(self.datasets.validation, self.datasets.test)

        def call() -> None:
            if self._overrides("describe"):
                with rehearsed("describe in model.py"):
                    described(self.learner, outputs)
            if self._overrides("pretrained"):
                with rehearsed("pretrained in model.py"):
                    networks = self.networks.view(self.networks.evaluated)
                    check_pretrained(self.learner.pretrained(networks))
            if self.settings.dry_run or not self.position.step:
                with rehearsed("draw in figures.py"):
                    from . import figures

                    for figure in figures.draw(test.sums, batch, outputs).values():
                        pixels(figure)

        self.world.on_main(call)

    def _finished_step(self) -> int:
        """Return the step in summary.json if the run ends there with these settings, else 0.

        The checkpoint of that step may have been removed. If the settings now ask for more steps,
        summary.json is that of the earlier end.

        Raises:
            UsageError: these settings ask for more steps, but the run has no checkpoint.
        """
        kinds = dict.fromkeys(("epochs", "global_step", "validations_since_best"), int)
        try:
            summary = read_object(self.checkpointing.run_dir / "summary.json", kinds)
        except (OSError, ValueError):
            return 0
        epoch, step, since_best = (summary.get(name, 0) for name in kinds)
        end = Position(epoch=epoch, step=step, validations_since_best=since_best)
        if step >= self.position.step and end.is_end(self.settings):
            return step
        if step and self.checkpointing.resumed_from is None:
            raise UsageError(
                f"{self.checkpointing.run_dir} has a run that finished at step {step}, and no "
                "checkpoint to resume from: choose another --run-dir, or --resume never to start "
                "again here"
            )
        return 0

    def _train_epoch(self) -> bool:
        """Train to the end of the epoch; return False if a signal stopped the run before."""
        position, settings = self.position, self.settings
        left = settings.max_steps and settings.max_steps - position.step + position.epoch_steps
        ends = (self.loader.samples and self.loader.samples // self.samples_per_step, left)
        length = min((each for each in ends if each), default=None)
        bar = self.logger.progress_bar(position.epoch, position.epoch_steps, length)
        steps = self.loader.epoch(position.epoch, position.consumed, position.epoch_steps)
        totals = StepTotals(self.world, self.request, position.step, self.loader.uneven)
        loaded = next(steps)
        totals.begin(position.step, *self.loader.sizes(loaded))
        stopping, samples = False, 1  # 0 samples would mean that the epoch is over
        while not position.is_end(settings):
            stopping, samples, weight = totals.result()
            if stopping or samples == 0:
                break
            # After the check for a signal, so that a stop does not wait for a validation.
            if is_due(settings.validate_every, position.step):
                self.validate()
                if position.is_end(settings):
                    break
            if self.profiler:
                self.profiler.step()
            # The all-reduce of the next step's totals runs while this step is computed.
            following = next(steps)
            totals.begin(position.step, *self.loader.sizes(following))
            self.train_step(loaded, samples, weight)
            loaded = following
            bar.update()
            self.hooks.call("on_step")
            self.hooks.note_written()
            if is_due(settings.log_every, position.step):
                self._log_step()
            intervals = (settings.checkpoint_every, settings.keep_every)
            due = any(is_due(every, position.step) for every in intervals)
            if due and not position.is_end(settings):
                self.save()
        totals.result()  # no all-reduce may stay pending after the last step
        bar.close()
        last = position.is_end(settings) or (samples == 0 and position.epoch + 1 >= settings.epochs)
        if last and not stopping and position.step % settings.log_every:
            self._log_step()  # for the steps since the last line of the log
        if stopping:
            self._stop()
        elif samples == 0:
            self._end_epoch()
        return not stopping

    def train_step(self, loaded: list[Loaded], samples: int, weight: int) -> None:
        """Take an optimizer step.

        Args:
            loaded: this rank's batches for the step.
            samples: number of samples in the step, over all ranks.
            weight: sum of `batch_weight`, over all ranks.
        """
        settings, position = self.settings, self.position
        factor = scaling(settings, self.samples_per_step) * self.learner.schedule(self.progress())
        self.networks.set_learning_rates(factor)
        measure_norm = is_due(settings.log_every, position.step + 1)
        self.updater.begin(self.loader.padded(loaded), weight, measure_norm)
        # Last, since reading a spare batch again seeds the generators for each of its samples.
        seed_generators(derive("step", settings.seed, self.world.rank, position.step))
        self.learner_step(self.updater)
        position.advance(samples)
        self.networks.update_averages(position.step)
        self.meter.count(samples, weight)

    def predict(self, split: str, samples: int = 16) -> tuple[Any, Any]:
        """Return this rank's first samples of a split as a batch, and their predictions."""
        return self.evaluator.predict(getattr(self.datasets, split), samples)

    def progress(self) -> float:
        """Return the share of the training that is done, from 0 to 1."""
        return self.position.progress(self.settings, self.loader.samples, self.samples_per_step)

    def _log_step(self) -> None:
        readings = self.meter.read(self.world)
        for name in filter(LOSS.fullmatch, readings):
            self.checkpointing.check_finite(f"{name} is", readings[name])
        rates = self.networks.learning_rates()
        self.logger.metrics(self.progress(), readings | rates)

    def _show_histograms(self) -> None:
        if is_due(self.settings.histograms_every, self.position.step + 1):
            parameters = named_parameters(self.networks.modules)
            self.logger.histograms(self.position.step + 1, parameters)

    def _end_epoch(self) -> None:
        """Validate if a validation is due, begin the next epoch, and save."""
        position = self.position
        if position.step == 0:
            raise UsageError("the training set has no samples: check data_dir")
        due = is_due(self.settings.validate_epochs, position.epoch + 1)
        if due and position.validated_step != position.step:
            metrics = self._evaluate()
            position.end_epoch()
            self._record(metrics)
        else:
            position.end_epoch()
            self.save()

    def save(self, best: bool = False) -> None:
        """Save a checkpoint in the background. Every rank calls this method."""
        path = self.checkpointing.checkpoints.path(self.position.step)
        self.hooks.checkpoint(path, best)
        self.checkpointing.save(self.logger.line_count, self.logger.flush, best)

    # -- validations ------------------------------------------------------------------------------

    def validate(self) -> None:
        """Evaluate on the validation set and save, unless this was done at this step already.

        Every rank calls this method.
        """
        if self.position.validated_step != self.position.step:
            self._record(self._evaluate())

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics of the validation set."""
        # Save first, so that a kill during a long validation does not lose the steps before it.
        self.save()
        with CLOCK.during("validation"):
            self.hooks.call("on_evaluation_start", "validation")
            step = self.position.step
            found = self.evaluator.evaluate(self.datasets.validation, "validation", step)
            self.hooks.call("on_evaluation_end", "validation", dict(found.metrics))
        return found.metrics

    def _record(self, metrics: dict[str, float]) -> None:
        """Log the metrics of a validation, decide whether they are the best, and save."""
        position, (name, direction) = self.position, self.learner.best
        self.checkpointing.check_finite(f"{name} is", metrics[name])
        best = position.judge(metrics[name], direction)
        self.logger.metrics(self.progress(), {"epoch": position.epoch, **metrics})
        self.save(best)
        if position.is_out_of_patience(self.settings):
            log.info(
                "no improvement for %d validations: the training ends at step %d; step %d was best",
                position.validations_since_best,
                position.step,
                position.best_step,
            )

    # -- the end of a run -------------------------------------------------------------------------

    def _stop(self) -> None:
        """Save and close the run after a signal. Every rank calls this method."""
        CLOCK.switch("ending")
        self.save()
        self.checkpointing.check_saved("stopped")
        self.hooks.note_written()
        self.logger.has_lines()
        log.info(
            "stopped at step %d by %s; to resume, run the same command with --run-dir %s",
            self.position.step,
            self.request.received or "a signal to another rank",
            self.checkpointing.run_dir,
        )
        self.meter.gather(self.world)
        if self.world.is_main:
            self.logger.log_usage()
        self.hooks.end("preempted")

    def finish(self) -> int:
        """Evaluate on the test set, and write summary.json and the figures.

        Every rank calls this method. Returns the exit code: 0, or 1 on rank 0 if a hook, a figure
        or the model registry failed, or if the file of metrics was removed. In a sweep, it is 0
        after these failures, too, because the trial has its result.
        """
        step = self.position.step
        CLOCK.switch("ending")
        self.hooks.call("on_evaluation_start", "test")
        with CLOCK.during("validation"):
            test = self.evaluator.evaluate(self.datasets.test, "test", step)
        self.checkpointing.check_saved("ended")
        self.logger.metrics(1.0, test.metrics)
        self.logger.summary(self.summary(test))
        try:
            self.hooks.call("on_evaluation_end", "test", dict(test.metrics))
            self.hooks.note_written()
            self._draw(test)
            self._register()
            self.hooks.call("on_end", "finished", None)
        except Exception as error:
            if not self.world.is_main:  # rank 0 reports the error and returns its exit code
                return 0
            unknown = not isinstance(error, UsageError)
            log.error(
                "the run is finished, but its figures, registry or hooks failed: %s",
                error,
                exc_info=unknown,
            )
            return 0 if "SWEEP_TRIAL" in os.environ else 1
        return 0 if self.logger.has_lines() else 1

    def summary(self, test: Evaluation) -> dict[str, Any]:
        """Return the content of summary.json. Every rank calls this method."""
        position, world, meter = self.position, self.world, self.meter
        meter.gather(world)
        return {
            **{metric.replace("/", "_"): value for metric, value in test.metrics.items()},
            self.learner.best[0].replace("/", "_"): position.best_score,
            "best_step": position.best_step,
            "epochs": position.epoch,
            "global_step": position.step,
            "validations_since_best": position.validations_since_best,
            "world_size": world.size,
            "backend": world.backend,
            "device": str(world.device),
            "hostnames": list(world.hostnames),
            **meter.rates(),
            "trained_seconds": meter.trained_seconds,
            "resumed_from_step": self.checkpointing.resumed_from,
            "parameters_sha256": digest(self.networks.modules),
        }

    def _draw(self, test: Evaluation) -> None:
        """Draw the figures of figures.py and log them. Every rank calls this method."""
        first = self.predict("test", self.settings.test_batch_size)
        if self.world.is_main:
            from . import figures

            drawn = figures.draw(test.sums, *first)
            for name, figure in drawn.items():
                self.logger.log_image(f"test/{name}", figure)

    def _register(self) -> None:
        """Add the best network to the trackers' model registry if `register_model` is set."""
        name = self.settings.register_model
        if name and self.world.is_main:
            best = self.learner.load(self.checkpointing.run_dir, self.settings)
            example = best.learner.inputs(best.example(self.datasets.test, 4))
            self.logger.trackers.call("log_model", best.networks, example, name, best.step)
