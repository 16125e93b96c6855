"""Experiment trackers with one interface. Each has a module, which is imported only if it is used.

To add a tracker, put a module here with a class `Tracker` that subclasses `Backend`, and add its
name to the setting `trackers`.
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
"""The values of each metric by step."""


class Backend:
    """A run in one tracker. A method that a subclass does not override does nothing.

    All calls come from one thread, which the backend has for itself (dispatch.py). Slurm's signals
    are blocked in this thread and in the processes that it starts. After a failure, the backend is
    off for the rest of the attempt.

    Attributes:
        run_id: the tracker's id of the run.
    """

    run_id: str

    def __init__(self, run: Run) -> None:
        """Start a new run, or continue the run with the id `run.run_id`."""
        raise NotImplementedError

    def history(self) -> History:
        """Return what the tracker has of a run that is continued; this is not logged again.

        It is called once, after the start. Pictures, histograms and tables are included by their
        names and steps, with any value. A backend that replaces or hides what was logged after
        `run.resume_step` leaves this out.
        """
        return {}

    def log_metrics(self, metrics: Mapping[str, float], step: int, time: float) -> None:
        """Record the metrics of a step, which were measured at `time`, in seconds since 1970."""
        raise NotImplementedError

    def log_image(self, name: str, image: "np.ndarray", step: int) -> None:
        """Record a picture: uint8, of shape (height, width, 3)."""

    def log_histogram(self, name: str, values: "np.ndarray", step: int) -> None:
        """Record a histogram of values: float, of shape (number of values,)."""

    def log_text(self, name: str, text: str, step: int) -> None:
        """Record a text, such as the log. A later text with the same name replaces it."""

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int
    ) -> None:
        """Record a table. The default records it as a text in CSV format."""
        self.log_text(name, as_csv(columns, rows), step)

    def log_model(
        self, network: "nn.Module", example: tuple[Any, ...], name: str, step: int
    ) -> None:
        """Put a network into the tracker's model registry.

        Args:
            network: the network, in evaluation mode and on the CPU.
            example: arguments of its `forward`, on the CPU.
            name: name of the model in the registry.
            step: the training step of the network.
        """

    def flush(self) -> None:
        """Write everything that was logged so far. It is called at each checkpoint."""

    def finish(self, status: Status, error: str | None) -> None:
        """Close the run. `error` is a line that says why it failed, or None."""


def available() -> list[str]:
    """Return the names of the trackers in this project."""
    return sorted({module.name for module in pkgutil.iter_modules(__path__)} - {"dispatch"})


def load(name: str) -> ModuleType:
    """Return the module of a tracker. Its class `Tracker` subclasses `Backend`."""
    return import_module(f".{name}", __package__)


def select(names: Sequence[str]) -> list[str]:
    """Return the trackers to use, without repetitions, and import their modules on rank 0.

    Args:
        names: the setting `trackers`; `none` alone means no tracker.

    Raises:
        UsageError: the project has no tracker with one of these names.
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
        # Import them before other threads start: their packages may set environment variables,
        # which can crash the process while another thread reads the environment. A failed import
        # is reported when the tracker starts.
        with suppress(Exception):
            load(name)
    return list(dict.fromkeys(names))
