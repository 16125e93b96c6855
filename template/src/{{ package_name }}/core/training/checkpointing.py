"""What a checkpoint holds: saved in the background, and restored at the start."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..checkpoint import restore
from ..checkpoint.store import Checkpoints
from ..checkpoint.writer import Saver
from ..config import Settings
from ..errors import UsageError
from ..output.log import log_resume
from ..output.metrics import Meter
from ..ranks.strategy import parameter_norm
from ..ranks.world import World
from .networks import Networks
from .position import Position


class Checkpointing:
    """Saves everything that a resumed run needs, and restores it.

    Random generators are not in it: they are seeded for each step and each sample.

    Args:
        networks, meter: with their state.
        settings, world: as everywhere.
        samples_per_step: of all ranks.

    Attributes:
        position: where the training stands.
        line_count: lines of metrics.jsonl at the checkpoint, None without one.
        resumed_from: the checkpoint's step, None without one.
        resized: whether epochs or max_steps were others there.
    """

    def __init__(
        self,
        networks: Networks,
        meter: Meter,
        settings: Settings,
        world: World,
        samples_per_step: int,
    ) -> None:
        self.networks, self.meter, self.settings, self.world = networks, meter, settings, world
        self.samples_per_step = samples_per_step
        self.run_dir = Path(str(settings.run_dir))
        self.checkpoints = Checkpoints(self.run_dir / "checkpoints", settings.keep_checkpoints)
        self.saver = Saver(self.checkpoints, world, settings.timeout)
        self.position = Position()
        self.line_count: int | None = None
        self.resumed_from: int | None = None
        self.resized = False
        self._resume()

    def save(self, line_count: int | None, before: Callable[[], object], best: bool) -> None:
        """Save in the background; every rank calls this.

        Args:
            line_count: lines of metrics.jsonl by now.
            before: what must have been done, in the background too, before the checkpoint counts.
            best: whether this is the best checkpoint by now.

        Raises:
            UsageError: on every rank, if a network has diverged: the checkpoints from before are
                worth more than this one.
        """
        norm = parameter_norm(self.networks.modules.values()).item()
        self.refuse_divergence("the norm of all parameters is", norm)
        state: dict[str, Any] = {
            **self.networks.state(),
            "position": self.position.as_dict(),
            "meter": self.meter.state(self.world),
            "line_count": line_count,
            "world_size": self.world.size,
            "samples_per_step": self.samples_per_step,
            "settings": self.settings.as_dict(),
        }
        self.saver.save(state, self.position.step, best, before)

    def refuse_divergence(self, what: str, value: float) -> None:
        """Raise UsageError for a value that is not finite."""
        if not math.isfinite(value):
            self.saver.wait()
            newest = self.checkpoints.latest() or "none had been saved yet"
            raise UsageError(
                f"{what} {value} at step {self.position.step}: lower lr, lengthen warmup, or set "
                f"clip_norm; the last checkpoint from before: {newest}"
            )

    def refuse_unsaved(self, what: str) -> None:
        """Wait for the last save; raise UsageError on every rank if it failed."""
        if not self.world.broadcast(self.saver.wait()):
            raise UsageError(
                f"{what} at step {self.position.step}, but the checkpoint could not be written: "
                f"make room for {self.checkpoints.folder}; the same command then goes on from the "
                "checkpoint before, if there is one"
            )

    def _resume(self) -> None:
        """Go on from the checkpoint that the settings lead to, if there is one."""
        found = restore.load_first(
            restore.candidates(self.settings.resume, self.run_dir), self.networks.like, self.world
        )
        if found is None:
            if self.networks.not_initialized:
                raise self.networks.not_initialized
            return
        path, state = found
        try:
            self._load(path, state)
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

    def _load(self, path: Path, state: dict[str, Any]) -> None:
        self.networks.load(state)
        self.position = Position.from_dict(state["position"])
        if state["samples_per_step"] != self.samples_per_step:
            # The batches that each rank would have had by now.
            self.position.epoch_steps = self.position.consumed // self.samples_per_step
        self.meter.resume(state["meter"], self.world)
        self.line_count = state["line_count"]
        log_resume(path, state, self.settings, self.world)
        before, now = state["settings"], self.settings
        self.resized = (before["epochs"], before["max_steps"]) != (now.epochs, now.max_steps)
        self.resumed_from = self.position.step
        self.saver.go_on_from(path, self.position.step)
