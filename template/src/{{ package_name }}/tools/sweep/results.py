"""Writes the results of a study: the best settings as a file for `train`, and a plot of trials."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
import yaml
from optuna.distributions import CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from ...engine.config import read_yaml
from ...engine.filesystem import write_atomically
from ...settings import Settings
from .trial_locks import run_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Settings of one run or one launch, which best.yaml leaves out.
OWN = ("config", "run_dir", "resume", "world_size", "dry_run")


def write(study: optuna.Study, folder: Path, metric: str) -> None:
    """Write best.yaml (for `train --config`) and study.png to the study's folder."""
    if study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        run = folder / run_name(study.best_trial.number)
        settings = read_yaml(run / "config.yaml")
        kept = {name: value for name, value in settings.items() if name not in OWN}
        # The experiment of a trial is the study, which is not a setting to keep.
        kept["experiment"] = Settings.parse([]).experiment
        title = f"# The settings of {run.name}: {metric} {study.best_value:.4f}\n"
        write_atomically(folder / "best.yaml", title + yaml.safe_dump(kept, sort_keys=False))
    drawn = picture(study, metric)
    write_atomically(folder / "study.png", partial(drawn.savefig, format="png", dpi=120))


def picture(study: optuna.Study, metric: str) -> "Figure":
    """Return a figure of the trials' values, over their numbers and over each searched setting."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    trials = study.get_trials(deepcopy=False)
    names = sorted({name for trial in trials for name in trial.params})
    figure = Figure(figsize=(4 * (1 + len(names)), 4), layout="constrained")
    first, *others = figure.subplots(1, 1 + len(names), sharey=True, squeeze=False)[0]
    _show(first, trials, [trial.number for trial in trials])
    _show_best_so_far(first, trials, study.direction)
    first.set(xlabel="trial", ylabel=metric, title=study.study_name)
    first.xaxis.get_major_locator().set_params(integer=True)
    first.legend()
    for axes, name in zip(others, names, strict=True):
        having = [trial for trial in trials if name in trial.params]
        values = [trial.params[name] for trial in having]
        kind = having[-1].distributions[name]
        if isinstance(kind, CategoricalDistribution):
            choices = list(dict.fromkeys([*kind.choices, *values]))
            values = [choices.index(value) for value in values]
            axes.set_xticks(range(len(choices)), [str(choice) for choice in choices])
        elif getattr(kind, "log", False):
            axes.set_xscale("log")
            axes.xaxis.set(
                major_locator=LogLocator(subs=(1, 2, 5)),
                major_formatter="{x:g}",
                minor_formatter=NullFormatter(),
            )
        _show(axes, having, values)
        axes.set(xlabel=name)
    return figure


def _show(axes: "Axes", trials: Sequence[FrozenTrial], places: Sequence[float]) -> None:
    """Draw a mark for each trial. A failed trial has no value, so its mark is on the axis."""
    for state, mark, label in (
        (TrialState.COMPLETE, "o", "complete"),
        (TrialState.PRUNED, "v", "pruned"),
    ):
        points = [
            (place, trial.value)
            for place, trial in zip(places, trials, strict=True)
            if trial.state == state and trial.value is not None
        ]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=mark, label=label)
    failed = [p for p, trial in zip(places, trials, strict=True) if trial.state == TrialState.FAIL]
    if failed:
        bottom = axes.get_xaxis_transform()
        axes.scatter(
            failed, [0] * len(failed), marker="x", color="red", transform=bottom, label="failed"
        )


def _show_best_so_far(
    axes: "Axes", trials: Sequence[FrozenTrial], direction: StudyDirection
) -> None:
    better = max if direction == StudyDirection.MAXIMIZE else min
    numbers: list[int] = []
    best: list[float] = []
    for trial in trials:
        if trial.state == TrialState.COMPLETE and trial.value is not None:
            numbers.append(trial.number)
            best.append(better([trial.value, *best[-1:]]))
    axes.step(numbers, best, where="post", color="gray", label="best so far")
