"""A validation: the metrics, whether they are the best so far, and a checkpoint.

When it is made says train.py; which metric decides, `best` of model.py; the best score so far, and
when there is no more patience, core/training/position.py.
"""

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .train import Trainer

log = logging.getLogger(__name__)


def validate(trainer: "Trainer", epoch_ends: bool = False) -> None:
    """Evaluate on the validation set and save, unless that was done at this step already.

    Every rank calls this.

    Args:
        trainer: whose networks are evaluated.
        epoch_ends: whether the next epoch begins with this.
    """
    position, checkpointing, logger = trainer.position, trainer.checkpointing, trainer.logger
    name, direction = trainer.learner.best
    began, best = time.perf_counter(), False
    found: dict[str, float] = {}
    if position.validated_step != position.step or position.best_score is None:
        # First of all: a signal in a long validation then costs no more than the validation.
        trainer.save()
        validation = trainer.datasets.validation
        found = trainer.evaluator.evaluate(validation, "validation", position.step).metrics
    if epoch_ends:
        position.end_epoch()
    elif not found:
        return
    if found:
        checkpointing.refuse_divergence(f"{name} is", found[name])
        best = position.judge(found[name], direction)
    logger.metrics(position.step, trainer.progress(), {"epoch": position.epoch, **found})
    logger.best(position.best_score, position.best_step)
    trainer.save(best)
    if position.is_out_of_patience(trainer.settings):
        log.info(
            "no better for %d validations: the training ends at step %d, its best was step %d",
            position.validations_since_best,
            position.step,
            position.best_step,
        )
    trainer.meter.skip(time.perf_counter() - began)
