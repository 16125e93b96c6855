"""Experiment trackers behind one interface; one module for each, imported only when used.

To add one, put a module here whose class `Tracker` is a `Backend`, and name it in `trackers`.
"""

import pkgutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..engine.errors import UsageError, is_rank_0
from ..engine.run.description import Run
from ..engine.run.media import as_csv
from ..engine.run.status import Status

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

History = dict[str, dict[int, float]]
"""For each metric its values, by step."""


class Backend:
    """A run in one tracker. A method that a tracker does not implement does nothing.

    All calls come from one thread, the backend's own (dispatch.py). Slurm's signals are blocked in
    it and in the processes that it starts. After a failure, the backend is off for the rest of the
    attempt.

    Attributes:
        run_id: what the backend calls the run.
    """

    run_id: str

    def __init__(self, run: Run) -> None:
        """Start the run, or continue the one that `run.run_id` names."""
        raise NotImplementedError

    def history(self) -> History:
        """Return the metrics that the run has and keeps, and with any value its pictures and so on.

        Called once, after the start of a run that is continued: these are not logged again. A
        backend that replaces or hides what came after `run.resume_step` leaves that out.
        """
        return {}

    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Record numbers of a step; time is when they were measured, in seconds since 1970."""
        raise NotImplementedError

    def log_image(self, name: str, image: "np.ndarray", step: int) -> None:
        """Record a picture: uint8, of shape (height, width, 3)."""

    def log_histogram(self, name: str, values: "np.ndarray", step: int) -> None:
        """Record how values are distributed: float, of shape (number of values,)."""

    def log_text(self, name: str, text: str, step: int) -> None:
        """Record a text, such as the log; a later text of the same name replaces it."""

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table; the default is a text, as CSV."""
        self.log_text(name, as_csv(columns, rows), step)

    def log_model(
        self, network: "nn.Module", example: tuple[Any, ...], name: str, step: int
    ) -> None:
        """Put a network into the registry of models.

        Args:
            network: in evaluation mode, on the CPU.
            example: the arguments of its forward, on the CPU.
            name: of the model in the registry.
        """

    def flush(self) -> None:
        """Save everything logged so far; called at each checkpoint."""

    def finish(self, status: Status, error: str | None) -> None:
        """Close the run; error is the line that says why it failed."""


def available() -> list[str]:
    """Return the names of the trackers that this project has."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"dispatch"})


def load(name: str) -> ModuleType:
    """Return the module of a tracker, whose `Tracker` is its `Backend`."""
    return import_module(f".{name}", __package__)


def select(names: Sequence[str]) -> list[str]:
    """Return the trackers to use, and import them on rank 0; `none` silences all.

    Raises:
        UsageError: a name that this project has no tracker for.
    """
    if list(names) == ["none"]:
        return []
    for name in names:
        if name not in available():
            raise UsageError(
                f"unknown tracker '{name}': this project has {', '.join(available()) or 'none'}; "
                "give names with spaces between, or 'none' alone, for no tracker"
            )
    for name in names if is_rank_0() else ():
        # Their packages may add environment variables. Once other threads read the environment,
        # that can crash the process. A failure is reported when the tracker starts.
        with suppress(Exception):
            load(name)
    return list(dict.fromkeys(names))
