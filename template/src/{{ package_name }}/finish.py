"""The end of a run: by a signal; or the test, the summary, figures, the registry of models."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def finish(trainer: "Trainer") -> None:
    """Evaluate on the test set, and write what the run leaves; every rank calls this."""
    step = trainer.position.step
    test = trainer.evaluator.evaluate(trainer.datasets.test, "test", step, keep_first=True)
    trainer.checkpointing.refuse_unsaved("ended")
    trainer.logger.metrics(step, 1.0, test.metrics)
    trainer.logger.summary(summary(trainer, test))
    if not trainer.world.is_main:
        return
    _draw(trainer, test)
    if trainer.settings.register_model:
        _register(trainer, trainer.settings.register_model)


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
    """Keep the figures of figures.py; a mistake in that file costs the figures only."""
    if test.first is None:
        return
    try:
        from . import figures

        drawn = figures.draw(test.sums, *test.first)
    except Exception:
        log.exception("figures.py failed, so there are no figures of this evaluation")
        return
    named = {f"test/{name}": figure for name, figure in drawn.items()}
    trainer.logger.figures(trainer.position.step, named)


def _register(trainer: "Trainer", name: str) -> None:
    """Put the best network into the registry of models."""
    from .inference import load

    trainer.checkpointing.saver.wait()
    best = trainer.checkpointing.checkpoints.best()
    if best is None:
        log.error("there is no checkpoint, so no network goes into the registry")
        return
    loaded = load(best, trainer.settings)
    example = loaded.learner.inputs(loaded.example(trainer.datasets.test, 4))
    trainer.logger.trackers.log("model", loaded.networks, example, name, loaded.step)
