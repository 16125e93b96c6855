"""Calls the hooks: the methods of `Model` for events in the training, such as `on_step`."""

import logging
import time
from pathlib import Path
from typing import Any, Protocol

from .checkpoint import Checkpointing
from .evaluate import Evaluator
from .networks import Networks
from .position import Position
from .ranks.world import World
from .run.logger import RunLogger
from .run.record import RECORDER

log = logging.getLogger(__name__)

SHORT = 0.001  # seconds; the time of a hook that takes longer is recorded


class Training(Protocol):
    """The first argument of hooks: the `Trainer` of train.py, which has these attributes.

    Attributes:
        learner: the `Model` of model.py.
        position: the counters `position.step`, `position.epoch`, `position.best_score` and so on.
        networks: `networks.modules` has the trained networks by name. A single network has the name
            "network".
        evaluator: `with evaluator.mode() as networks` gives the networks that evaluations use, with
            `ema` the moving averages, in evaluation mode and without gradients. Every rank calls
            this.
        datasets: the return value of `load` in data.py.
        world: the rank of this process, the number of ranks, and ways to exchange values.
        logger: its methods `log_...` log numbers, pictures, texts, tables and histograms.
        checkpointing: `checkpointing.run_dir` is the run folder.
    """

    learner: Any
    position: Position
    networks: Networks
    evaluator: Evaluator
    datasets: Any
    world: World
    logger: RunLogger
    checkpointing: Checkpointing

    def progress(self) -> float:
        """Return how much of the training is done, from 0 to 1."""

    def predict(self, split: str, samples: int = 16) -> tuple[Any, Any]:
        """Return a batch of this rank's first samples of a split, and its predictions, on the CPU.

        Every rank calls this.

        Args:
            split: "train", "validation" or "test".
            samples: the number of samples of each rank.
        """


class Hooks:
    """Calls the hooks of a learner.

    Attributes:
        unseen: the newest checkpoint, and whether it is the best, until `on_checkpoint` gets it.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.unseen: tuple[Path, bool] | None = None

    def call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401 - what the hook takes
        """Call a hook; log its name if it fails, and record its time if it is slow."""
        began = time.perf_counter()
        try:
            getattr(self.training.learner, name)(self.training, *arguments)
        except Exception:
            log.error("%s in model.py failed at step %d", name, self.training.position.step)
            raise
        if (seconds := time.perf_counter() - began) > SHORT:
            RECORDER.add("train/slowest_hook_seconds", seconds, 1, "max")

    def checkpoint(self, path: Path, best: bool) -> None:
        """Note a new checkpoint, for which `on_checkpoint` will be called.

        A step that is saved before and after its validation counts as one checkpoint.
        """
        if self.unseen and self.unseen[0] != path:
            self.note_written(wait=True)
        self.unseen = path, best

    def note_written(self, wait: bool = False) -> None:
        """Call `on_checkpoint` on rank 0 if the noted checkpoint is written.

        Args:
            wait: whether to wait until it is written.
        """
        checkpointing = self.training.checkpointing
        saving = checkpointing.writing
        if self.unseen and saving and (wait or saving.done()):
            checkpoint, self.unseen = self.unseen, None
            if checkpointing.wait() and self.training.world.is_main:
                self.call("on_checkpoint", *checkpoint)

    def end(self, status: str, error: BaseException | None = None) -> None:
        """Call `on_end` after a stop or a failure; an error in it must not hide the failure."""
        try:
            self.call("on_end", status, error)
        except Exception:
            log.exception("on_end in model.py failed; the run keeps its status")
