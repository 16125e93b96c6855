"""What trackers are told of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Settings


@dataclass(frozen=True)
class Run:
    """What a tracker is told of a run.

    Args:
        directory: the run's folder, shared by all attempts of the run.
        store: folder of what the runs of the experiment share, such as a database.
        name: the run's name; experiment: the group it belongs to.
        settings: the effective settings.
        provenance: where the run came from: commit, packages, machines (provenance.py).
        tags: words to find it by.
        resume_step: the step that this attempt goes on from, 0 for the beginning.
        run_id: the id that this tracker gave the run before, None for a new run.
        rank: the rank whose numbers these are. Other ranks than 0 have runs of their own, where
            all ranks are tracked; main_id is then the id of rank 0's run in this tracker.
        started: to be called with the run's id as soon as there is one, where the start goes on
            after that: a start that fails later is then not repeated as a second run.
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
    rank: int = 0
    main_id: str | None = None
    started: Callable[[str], None] = lambda _: None


def describe_run(
    settings: Settings, facts: Mapping[str, Any], resume_step: int, rank: int = 0
) -> Run:
    """Return what trackers are told of a run."""
    folder = Path(str(settings.run_dir)).absolute()
    name = f"{settings.experiment}/{folder.name}"
    return Run(
        directory=folder,
        store=Path(settings.run_root, settings.experiment).absolute(),
        name=f"{name}/rank{rank}" if rank else name,
        experiment=settings.experiment,
        settings=settings.as_dict(),
        provenance=facts,
        tags=settings.tags,
        resume_step=resume_step,
        rank=rank,
    )
