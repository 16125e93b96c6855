"""The description of a run for the trackers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Settings


@dataclass(frozen=True)
class Run:
    """The description of a run for one tracker.

    Args:
        directory: the run folder, shared by all attempts of the run.
        store: the folder for files that all runs of the experiment share, such as a database.
        name, experiment: the names of the run and of its experiment.
        settings: the effective settings.
        provenance: commit, packages, machines and so on (provenance.py).
        tags: words by which users can find the run.
        resume_step: the step that this attempt resumes from, 0 for a new run.
        run_id: the id that the tracker gave the run in an earlier attempt, None for a new run.
    """

    directory: Path
    store: Path
    name: str
    experiment: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()
    resume_step: int = 0
    run_id: str | None = None


def describe_run(settings: Settings, facts: Mapping[str, Any], resume_step: int) -> Run:
    """Return the description of a run; `facts` is its provenance."""
    folder = Path(str(settings.run_dir)).absolute()
    return Run(
        directory=folder,
        store=Path(settings.run_root, settings.experiment).absolute(),
        name=f"{settings.experiment}/{folder.name}",
        experiment=settings.experiment,
        settings=settings.as_dict(),
        provenance=facts,
        tags=settings.tags,
        resume_step=resume_step,
    )
