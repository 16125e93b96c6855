"""Experiment trackers behind one protocol; one module for each, imported only when used.

To add one, put a module here whose class `Tracker` follows the protocol, and name it in
`trackers`.
"""

import logging
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from ..errors import UsageError

log = logging.getLogger(__name__)

Status = Literal["finished", "failed", "preempted"]


@dataclass(frozen=True)
class Run:
    """What a tracker is told of a run.

    Args:
        directory: the run's folder, shared by all attempts of the run.
        name: the run's name; experiment: the group it belongs to.
        settings: the effective settings.
        tags: words to find it by.
        resume_step: the step that this attempt goes on from, 0 for a new run.
        run_id: the id that this tracker gave the run before, None for a new run.
    """

    directory: Path
    name: str
    experiment: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    resume_step: int = 0
    run_id: str | None = None


class Tracker(Protocol):
    """A backend. Its constructor starts the run, or goes on with the one that `run.run_id` names.

    Attributes:
        run_id: what the backend calls the run.
    """

    run_id: str

    def __init__(self, run: Run) -> None: ...

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers of a step."""

    def flush(self) -> None:
        """Make everything logged so far outlive the process; called at each checkpoint."""

    def finish(self, status: Status) -> None:
        """Close the run."""


def available() -> list[str]:
    """Return the names of the trackers that this project has."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def select(names: Sequence[str]) -> list[str]:
    """Return the trackers to use; `none` silences all.

    Raises:
        UsageError: a name that this project has no tracker for.
    """
    if "none" in names:
        return []
    for name in names:
        if name not in available():
            raise UsageError(
                f"unknown tracker '{name}': this project has {', '.join(available()) or 'none'}, "
                "and 'none' silences all"
            )
    return list(dict.fromkeys(names))


class Trackers:
    """All chosen trackers as one. With none chosen, every call does nothing.

    A tracker never stops the training: one that fails is switched off, with its traceback in the
    log. metrics.jsonl has the numbers all the same.

    Args:
        names: as `select` returned them.
        run: what to tell them; its `run_id` is replaced by each tracker's own.
        run_ids: the ids that an interrupted run had, by tracker.
    """

    def __init__(self, names: Sequence[str], run: Run, run_ids: Mapping[str, str]) -> None:
        self.active: dict[str, Tracker] = {}
        # A tracker that is silent this time keeps its run for the next.
        self.run_ids = dict(run_ids)
        for name in names:
            own = replace(run, run_id=run_ids.get(name))
            try:
                tracker = import_module(f".{name}", __package__).Tracker(own)
            except Exception:
                log.exception("tracker %s could not start and is off for this run", name)
                continue
            self.active[name] = tracker
            self.run_ids[name] = tracker.run_id

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record numbers of a step."""
        self._each(lambda tracker: tracker.log_metrics(metrics, step))

    def flush(self) -> None:
        """Make everything logged so far outlive the process."""
        self._each(lambda tracker: tracker.flush())

    def finish(self, status: Status) -> None:
        """Close the run."""
        self._each(lambda tracker: tracker.finish(status))
        self.active.clear()

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self.active.items()):
            try:
                call(tracker)
            except Exception:
                log.exception("tracker %s failed and is off for the rest of this run", name)
                del self.active[name]
