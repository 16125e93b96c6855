"""A training: what the loop in train.py and the hooks of model.py use."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from .checkpoint import Checkpointing
from .checkpoint_files import check_readable, find_start
from .checks import (
    check_datasets,
    check_loaded,
    check_pretrained,
    check_same_settings,
    part_of,
    rehearsed,
)
from .config import Settings
from .data.seeds import derive, seed_generators
from .data.steps import StepLoader
from .epochs import Epoch, Step
from .errors import UsageError
from .evaluate import Evaluation, Evaluator
from .foreign import read_object
from .hooks import Hooks
from .inference import described
from .networks import Networks, digest
from .position import Position, is_due
from .ranks.process_group import joined, lost_ranks_explained
from .ranks.signals import EXIT_CODE, StopRequest
from .ranks.step_totals import StepTotals
from .ranks.world import World
from .run import run_lock
from .run.clock import CLOCK
from .run.folder import with_run_dir
from .run.logger import RunLogger
from .run.logging_setup import set_up_logging
from .run.media import pixels
from .run.messages import log_start
from .run.meters import Meter
from .run.record import LOSS
from .schedule import scaling
from .updater import Updater

log = logging.getLogger(__name__)


class Training:
    """Everything that a training uses, and what it does between steps. Hooks get this object.

    Args:
        learner: the `Model` of model.py.
        datasets: the return value of `load` in data.py.
        settings: of the run; `run_dir` is set.
        world: this rank and the others.
        request: records a signal that asks the run to stop.
        plugins: makes the plug-ins: `load` of plugins/.

    Attributes:
        position: the counters `position.step`, `position.epoch`, `position.best_score` and so on.
        networks: `networks.modules` has the trained networks by name. A single network has the name
            "network".
        evaluator: `with evaluator.mode() as networks` gives the networks that evaluations use, with
            `ema` the moving averages, in evaluation mode and without gradients. Every rank calls
            this.
        world: the rank of this process, the number of ranks, and ways to exchange values.
        logger: its methods `log_...` log numbers, pictures, texts, tables and histograms.
        checkpointing: `checkpointing.run_dir` is the run folder.
        exit_code: of the process, once the run has finished.
    """

    logger: RunLogger

    def __init__(
        self,
        learner: Any,  # noqa: ANN401 - engine/ does not know the user's classes
        datasets: Any,  # noqa: ANN401
        settings: Any,  # noqa: ANN401
        world: World,
        request: StopRequest,
        plugins: "Callable[[Training], Sequence[Any]] | None" = None,
    ) -> None:
        self.learner, self.settings, self.world, self.request = learner, settings, world, request
        self.exit_code, self.hooks = 0, Hooks(self, plugins(self) if plugins else ())
        self.meter = Meter(learner.unit)
        self.datasets = check_loaded(datasets)
        weigh = learner.batch_weight if self._overrides("batch_weight") else None
        self.loader = StepLoader(self.datasets.train, settings, world, weigh)
        check_datasets(self.datasets, self.loader.samples, settings, world)
        torch.manual_seed(settings.seed)
        start = world.on_main(lambda: find_start(settings.resume, Path(settings.run_dir)))
        self.networks = Networks(learner, settings, world, resumes=start is not None)
        self.evaluator = Evaluator(learner, self.networks, settings, world)
        self.updater = Updater(self.networks, settings, world)
        self.checkpointing = Checkpointing(self.networks, self.meter, settings, world, self.loader)
        if start:
            self.checkpointing.resume(start)
        self.position = self.checkpointing.position

    def _overrides(self, name: str) -> bool:
        """Return whether the learner has a method in place of the default one."""
        return sum(name in vars(each) for each in type(self.learner).__mro__) > 1

    # -- the start --------------------------------------------------------------------------------

    def has_steps(self, draw: Callable[..., dict[str, Any]]) -> bool:
        """Log what the run will do, and check it; return False if it is finished, or a dry run.

        Args:
            draw: takes the sums of an evaluation, a batch and its predictions, and returns figures
                by name.
        """
        log_start(self.settings, self.world, self.loader)
        if self.settings.resume != "never" and (end := self.world.on_main(self._finished_step)):
            log.info(
                "nothing is left to do: summary.json says that this run has finished at step %d; "
                "choose another --run-dir, or larger --epochs, --max-steps or --patience",
                end,
            )
            return False
        self._check(draw)
        if self.settings.dry_run:
            log.info("dry run: samples were evaluated, predicted and drawn; no step was taken")
        return not self.settings.dry_run

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

    def _check(self, draw: Callable[..., dict[str, Any]]) -> None:
        """Call what the run needs only at its end, to find mistakes before the first step.

        Only a first start and a dry run draw figures, since this imports matplotlib.
        """
        if self.loader.has_state:
            state = {"state_dict of the training set": self.datasets.train.state_dict()}
            self.world.on_main(lambda: check_readable(state))
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
                    for figure in draw(test.sums, batch, outputs).values():
                        pixels(figure)

        self.world.on_main(call)

    @contextmanager
    def running(self, trackers: Callable[..., Any]) -> Iterator[None]:
        """Write the run folder inside the context; at its end, close everything, also on errors.

        Args:
            trackers: starts the trackers on rank 0: `Trackers` of trackers/dispatch.py.
        """
        self.logger = RunLogger(
            self.settings, self.world, trackers, self.checkpointing, self.learner.best
        )
        with (
            closing(self.logger),
            self._closing(),
            self.logger,
            closing(self.loader),
            closing(self.checkpointing),
            lost_ranks_explained(self.world.rank),
        ):
            try:
                self.hooks.call("on_start")
                CLOCK.switch("steps")
                yield
            except BaseException as error:
                if self.world.is_main:
                    self.hooks.end("on_end", "failed", error)
                raise

    @contextmanager
    def _closing(self) -> Iterator[None]:
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.hooks.end("on_close", error)

    # -- steps ------------------------------------------------------------------------------------

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs that are left, the current one with the steps that are left in it."""
        position, loader, bar = self.position, self.loader, self.logger.progress_bar
        while not position.is_end(self.settings):
            totals = StepTotals(self.world, self.request, position.step, loader.uneven)
            yield Epoch(loader, position, self.settings, totals, bar)

    def prepare(self, step: Step) -> None:
        """Set the learning rates and the random seed, and move the batches to the device."""
        settings, taken = self.settings, self.position.step
        scale = scaling(settings, self.loader.samples_per_step)
        factor = scale * self.learner.schedule(self.progress())
        self.networks.set_learning_rates(factor)
        self.updater.begin(step.batches, step.weight, is_due(settings.log_every, taken + 1))
        seed_generators(derive("step", settings.seed, self.world.rank, taken))

    def count(self, step: Step) -> None:
        """Count a step that was taken, and update the moving averages."""
        self.position.advance(step.samples)
        self.networks.update_averages(self.position.step)
        self.meter.count(step.samples, step.weight)

    def is_due(self, *intervals: int) -> bool:
        """Return whether the number of steps is a multiple of an interval that is not 0."""
        return any(is_due(every, self.position.step) for every in intervals)

    def progress(self) -> float:
        """Return the share of the training that is done, from 0 to 1."""
        loader = self.loader
        return self.position.progress(self.settings, loader.samples, loader.samples_per_step)

    def log(self) -> None:
        """Log the metrics of the steps since the last line, over all ranks."""
        self.hooks.call("on_log")
        readings = self.meter.read(self.world)
        for name in filter(LOSS.fullmatch, readings):
            self.checkpointing.check_finite(f"{name} is", readings[name])
        self.logger.metrics(self.progress(), readings | self.networks.learning_rates())

    def save(self, best: bool = False) -> None:
        """Save a checkpoint in the background. Every rank calls this method."""
        self.hooks.call("on_save")
        self.hooks.checkpoint(self.checkpointing.checkpoints.path(self.position.step), best)
        self.checkpointing.save(self.logger.line_count, self.logger.flush, best)

    # -- evaluations ------------------------------------------------------------------------------

    def evaluate(self, split: str) -> Evaluation:
        """Evaluate on a split, "validation" or "test". Every rank calls this method."""
        with CLOCK.during("validation"):
            self.hooks.call("on_evaluation_start", split)
            dataset = getattr(self.datasets, split)  # or several
            found = self.evaluator.evaluate(dataset, split, self.position.step)
            if split != "test":  # an error in the last call must not undo the run: see `finish`
                self.hooks.call("on_evaluation_end", split, dict(found.metrics))
        return found

    def predict(self, split: str, samples: int = 16) -> tuple[Any, Any]:
        """Return a batch of this rank's first samples of a split, and its predictions, on the CPU.

        Every rank calls this.

        Args:
            split: "train", "validation" or "test", or "validation/NAME" for one of several sets.
            samples: the number of samples of each rank.
        """
        return self.evaluator.predict(part_of(self.datasets, split), samples)

    # -- the end ----------------------------------------------------------------------------------

    def stop(self) -> int:
        """Save and end the run after a signal; return the exit code, with which it is requeued.

        Every rank calls this method.
        """
        self.save()
        self.checkpointing.check_saved("stopped")
        CLOCK.switch("ending")
        self.hooks.note_written()
        self.logger.has_lines()
        log.info(
            "stopped at step %d by %s; to resume, run the same command with --run-dir %s",
            self.position.step,
            self.request.received or "a signal to another rank",
            self.checkpointing.run_dir,
        )
        self.hooks.end("on_end", "preempted", None)
        self.logger.ending = "preempted"
        return EXIT_CODE

    def write_summary(self, test: dict[str, float]) -> None:
        """Write summary.json, with the metrics of the test set. Every rank calls this method."""
        position, world, meter = self.position, self.world, self.meter
        summary = {
            **{metric.replace("/", "_"): value for metric, value in test.items()},
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
        self.hooks.call("on_summary", summary)
        self.logger.summary(summary)

    @contextmanager
    def concluding(self) -> Iterator[None]:
        """Let a failure in the context leave the run finished, and call `on_end`."""
        with self._surviving():
            self.hooks.note_written()
            yield
        with self._surviving():
            self.hooks.call("on_end", "finished", None)
        if not self.logger.has_lines():
            self.exit_code = 1
        self.logger.ending = "finished"

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Log a failure in the context, and set the exit code 1, on rank 0.

        In a sweep, the code stays 0, because the trial has its result.
        """
        try:
            yield
        except Exception as error:
            if self.world.is_main:  # rank 0 reports the error and returns its exit code
                unknown = not isinstance(error, UsageError)
                log.error(
                    "the run is finished, but its figures or hooks failed: %s",
                    error,
                    exc_info=unknown,
                )
                self.exit_code = 0 if "SWEEP_TRIAL" in os.environ else 1


@contextmanager
def opened(
    settings: Settings,
    request: StopRequest,
    make: Callable[[Any], Any],
    load: Callable[[Any], Any],
    plugins: Callable[[Training], Sequence[Any]],
) -> Iterator[Training]:
    """Join the other ranks, reserve the run folder, and restore its newest checkpoint.

    Args:
        make: makes the learner from the settings.
        load: `load` of data.py.
        plugins: `load` of plugins/.
    """
    with joined(settings) as world:
        set_up_logging(world, settings.log_all_ranks)
        check_same_settings(settings, world)
        settings = with_run_dir(settings.for_world(world.size), world)
        with run_lock.own_run_folder(settings, world):
            yield Training(make(settings), load(settings), settings, world, request, plugins)
