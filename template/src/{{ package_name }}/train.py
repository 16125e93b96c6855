"""The training loop: epochs, steps, validations, and the end of a run."""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from . import data, plugins
from .engine.epochs import Epoch, Step
from .engine.position import is_due
from .engine.ranks.signals import StopRequest
from .engine.run.clock import CLOCK
from .engine.training import Training, opened
from .learner import model_class
from .settings import Settings
from .trackers import select
from .trackers.dispatch import Trackers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)


def run(settings: Settings, request: StopRequest) -> int:
    """Train with these settings. Every rank calls this function.

    Returns the exit code of the process: 0, or 75 if a signal stopped the run and a checkpoint was
    saved. A Slurm job that exits with 75 is requeued (slurm/resume.sh).
    """
    trackers = partial(Trackers, select(settings.trackers))
    with opened(settings, request, model_class(), data.load, plugins.load) as training:
        if training.has_steps(draw):
            with training.running(trackers):
                return train(training)
    return 0


def train(training: Training) -> int:
    """Train until the end of the run or a stop; return the exit code of the process."""
    settings, position = training.settings, training.position
    for epoch in training.epochs():
        validate_if_due(training, epoch)  # after the last step of an epoch or attempt
        for step in epoch:
            train_step(training, step)
            training.hooks.after_step()
            if training.is_due(settings.log_every):
                training.log()
            if training.is_due(settings.checkpoint_every, settings.keep_every) and not epoch.is_end:
                training.save()
            validate_if_due(training, epoch)
        if epoch.is_stopped:
            return training.stop()
        if epoch.is_last and position.step % settings.log_every:
            training.log()  # the steps since the last line of the log
        if epoch.is_complete:
            end_epoch(training)
    if not position.is_validated:
        validate(training)
    return finish(training)


def train_step(training: Training, step: Step) -> None:
    """Take an optimizer step."""
    training.prepare(step)
    training.learner.train_step(training.updater)
    training.count(step)


def end_epoch(training: Training) -> None:
    """Validate if a validation is due, begin the next epoch, and save."""
    position = training.position
    if is_due(training.settings.validate_epochs, position.epoch + 1) and not position.is_validated:
        validate(training, ends_epoch=True)
    else:
        position.end_epoch()
        training.save()


def validate_if_due(training: Training, epoch: Epoch) -> None:
    """Validate if the setting asks for it at this step. After a stop, the resumed run does it."""
    due = training.is_due(training.settings.validate_every)
    if due and not training.position.is_validated and not epoch.is_over:
        validate(training)


def validate(training: Training, ends_epoch: bool = False) -> None:
    """Evaluate on the validation set, decide whether the metrics are the best so far, and save."""
    position, (name, direction) = training.position, training.learner.best
    training.save()  # so that a kill during a long validation does not lose the steps before it
    metrics = training.evaluate("validation").metrics
    if ends_epoch:
        position.end_epoch()
    training.checkpointing.check_finite(f"{name} is", metrics[name])
    best = position.judge(metrics[name], direction)
    training.logger.metrics(training.progress(), {"epoch": position.epoch, **metrics})
    training.save(best)
    if position.is_out_of_patience(training.settings):
        log.info(
            "no improvement for %d validations: the training ends at step %d; step %d was best",
            position.validations_since_best,
            position.step,
            position.best_step,
        )


def finish(training: Training) -> int:
    """Evaluate on the test set, and write summary.json and the figures; return the exit code."""
    CLOCK.switch("ending")
    test = training.evaluate("test")
    training.checkpointing.check_saved("ended")
    training.logger.metrics(1.0, test.metrics)
    training.write_summary(test.metrics)
    with training.concluding():
        training.hooks.call("on_evaluation_end", "test", dict(test.metrics))
        batch, outputs = training.predict("test", training.settings.test_batch_size)
        if training.world.is_main:
            for name, figure in draw(test.sums, batch, outputs).items():
                training.logger.log_image(f"test/{name}", figure)
    return training.exit_code


def draw(*test: Any) -> "dict[str, Figure]":  # noqa: ANN401
    """Return what `draw` in figures.py returns. Importing matplotlib takes half a second."""
    from . import figures

    return figures.draw(*test)
