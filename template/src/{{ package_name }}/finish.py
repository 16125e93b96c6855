"""The end of a run: by a signal; or the test, the summary, figures, the registry of models."""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .core.errors import UsageError
from .core.filesystem import read_object
from .core.training.networks import digest
from .evaluate import Evaluation

if TYPE_CHECKING:
    from .train import Trainer

log = logging.getLogger(__name__)


def is_finished(run_dir: Path, step: int) -> bool:
    """Return whether the run was finished at this step, and not at one before it was prolonged."""
    try:
        return read_object(run_dir / "summary.json", {}).get("global_step") == step
    except (OSError, ValueError):
        return False


def stop(trainer: "Trainer") -> None:
    """Save, since a signal came; every rank calls this."""
    trainer.save()
    trainer.checkpointing.refuse_unsaved("stopped")
    log.info(
        "stopped at step %d by %s; the same command with --run-dir %s goes on from there",
        trainer.position.step,
        trainer.request.received or "a signal to another rank",
        trainer.checkpointing.run_dir,
    )


def finish(trainer: "Trainer") -> int:
    """Evaluate on the test set, and write what the run leaves; every rank calls this.

    Returns:
        The process's exit code: 1 on rank 0 if something failed after the summary was written. In
        a sweep it is 0, since the trial has its result.
    """
    step = trainer.position.step
    test = trainer.evaluator.evaluate(trainer.datasets.test, "test", step)
    trainer.checkpointing.refuse_unsaved("ended")
    trainer.logger.metrics(step, 1.0, test.metrics)
    trainer.logger.summary(summary(trainer, test))
    code = 0
    for what, leave in (("figures", _draw), ("model in the registry", _register)):
        try:
            leave(trainer, test)
        except Exception as error:
            if trainer.world.is_main:  # what other ranks predict is not kept
                unknown = not isinstance(error, UsageError)
                log.error("the run is finished, but has no %s: %s", what, error, exc_info=unknown)
                code = 0 if "SWEEP_TRIAL" in os.environ else 1
    return code


def summary(trainer: "Trainer", test: Evaluation) -> dict[str, Any]:
    """Return the content of summary.json; every rank calls this."""
    position, world, meter = trainer.position, trainer.world, trainer.meter
    return {
        **{metric.replace("/", "_"): value for metric, value in test.metrics.items()},
        trainer.learner.best[0].replace("/", "_"): position.best_score,
        "best_step": position.best_step,
        "epochs": position.epoch,
        "global_step": position.step,  # by which `is_finished` knows
        "world_size": world.size,
        "backend": world.backend,
        "device": str(world.device),
        "hostnames": list(world.hostnames),
        **meter.rates(),
        "trained_seconds": meter.trained_seconds,
        "resumed_from_step": trainer.checkpointing.resumed_from,
        "parameters_sha256": digest(trainer.networks.modules),
    }


def _draw(trainer: "Trainer", test: Evaluation) -> None:
    """Keep the figures of figures.py; every rank calls this."""
    first = trainer.evaluator.predict(trainer.datasets.test, trainer.settings.test_batch_size)
    if trainer.world.is_main:
        from . import figures

        drawn = figures.draw(test.sums, *first)
        named = {f"test/{name}": figure for name, figure in drawn.items()}
        trainer.logger.figures(trainer.position.step, named)


def _register(trainer: "Trainer", _test: Evaluation) -> None:
    """Put the best network into the registry of models, where the settings name it there."""
    name = trainer.settings.register_model
    if not name or not trainer.world.is_main:
        return
    from .inference import load

    trainer.checkpointing.wait()
    best = trainer.checkpointing.checkpoints.best()
    if best is None:
        raise UsageError("there is no checkpoint")
    loaded = load(best, trainer.settings)
    example = loaded.learner.inputs(loaded.example(trainer.datasets.test, 4))
    trainer.logger.trackers.log("model", loaded.networks, example, name, loaded.step)
