"""Runs trials with settings that Optuna chooses. Several jobs can work on one study."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import optuna
import tyro
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import Trial, TrialState

from ...engine.config import with_full_paths
from ...engine.errors import UsageError
from ...engine.foreign import read_lines
from ...engine.ranks.signals import EXIT_CODE, StopRequest
from ...settings import Settings
from .. import program
from .results import write
from .space import search_space
from .trial import as_flags, check_launch, run
from .trial_locks import TrialLocks, run_name

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Search for the settings with the best value of a metric.

    It also takes the flags of train. After -- comes the command that starts the training. To
    continue a stopped sweep, run the same command again. Other jobs that run it work on the same
    study.
    """

    trials: int = 20
    """number of trials of the study, including those of other jobs and of earlier starts"""
    study: str = "sweep"
    """name of the study, whose trials and journal are in RUN_ROOT/STUDY"""
    search: Path = Path("configs/sweep.yaml")
    """file with the search space: the settings and their ranges"""
    metric: str | None = None
    """metric to optimize, by its name in metrics.jsonl; the best value of a trial counts;
    default: the metric that decides the best checkpoint (`best` in model.py)"""
    direction: Literal["maximize", "minimize"] | None = None
    """whether to look for the largest or the smallest value; required with --metric"""
    pruner: Literal["median", "hyperband", "none"] = "median"
    """method that ends a trial early if it is worse than others at the same validation"""
    unpruned: int = 5
    """number of trials that must be complete before the median pruner ends a trial"""


def search(own: Sequence[str], launch: Sequence[str]) -> int:
    """Run trials until there are enough; return 0, 75 if a signal stopped one, 1 if all failed.

    Args:
        own: flags of this command, and of train.
        launch: the command that starts a training.

    Raises:
        UsageError: no launch command, or a mistake in the search file or in the settings.
    """
    flags, train_flags = tyro.cli(Flags, args=own, return_unknown_args=True, prog=program("sweep"))
    check_launch(launch)
    flags = _with_metric(with_full_paths(flags))
    settings = Settings.parse(train_flags, prog="sweep")
    space = search_space(flags.search)
    folder = Path(settings.run_root, flags.study)
    folder.mkdir(parents=True, exist_ok=True)
    study = open_study(flags, settings, folder)
    claims = TrialLocks(study, folder)
    stop = StopRequest.install()
    command = [*launch, *train_flags, f"--experiment={flags.study}"]
    while not stop.received and (trial := claims.next(space, flags.trials)):
        run_dir = folder / run_name(trial.number)
        words = as_flags(trial.params)
        log.info("%s of %d trials: %s", run_dir.name, flags.trials, " ".join(words))
        progress = Progress(trial, run_dir / "metrics.jsonl", flags)
        code, pruned = run([*command, *words, f"--run-dir={run_dir}"], stop, progress.is_hopeless)
        if code == EXIT_CODE and not pruned:
            claims.release(trial)
            log.warning("%s was stopped; run the same command to continue it", run_dir.name)
            return EXIT_CODE
        conclude(trial, code, pruned, progress)
        write(study, folder, str(flags.metric))
    return EXIT_CODE if stop.received else report(study, folder, str(flags.metric))


def _with_metric(flags: Flags) -> Flags:
    """Return the flags, with the metric of model.py if they name none."""
    if flags.metric and flags.direction:
        return flags
    if flags.metric or flags.direction:
        raise UsageError("--metric and --direction belong together: give both, or neither")
    from ...learner import model_class

    metric, best = model_class().best
    direction: Literal["maximize", "minimize"] = "maximize" if best == "max" else "minimize"
    return dataclasses.replace(flags, metric=metric, direction=direction)


def open_study(flags: Flags, settings: Settings, folder: Path) -> optuna.Study:
    """Return the study; create it if it does not exist.

    Raises:
        UsageError: the study was started with another metric or direction.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruners = {
        "median": optuna.pruners.MedianPruner(n_startup_trials=flags.unpruned),
        "hyperband": optuna.pruners.HyperbandPruner(max_resource=settings.epochs),
        "none": optuna.pruners.NopPruner(),
    }
    # A file that is only appended to is safe on shared file systems; SQLite is not. The lock is a
    # file, too, and the path is absolute, so that every worker sees a lock that a dead worker left.
    journal = str(folder.absolute() / "journal.log")
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(journal, JournalFileOpenLock(journal))),
        study_name=flags.study,
        direction=flags.direction,
        # A running trial counts as bad, so that another job does not try the same settings.
        sampler=optuna.samplers.TPESampler(constant_liar=True),
        pruner=pruners[flags.pruner],
        load_if_exists=True,
    )
    begun = (study.user_attrs.get("metric", flags.metric), study.direction.name.lower())
    if begun != (flags.metric, flags.direction):
        raise UsageError(
            f"study '{flags.study}' was started to {begun[1]} {begun[0]}: use the same --metric "
            "and --direction, or another --study"
        )
    study.set_user_attr("metric", flags.metric)
    return study


class Progress:
    """Reports the validations of a trial to Optuna while the training writes them.

    Args:
        trial: the trial.
        path: path of metrics.jsonl in the trial's run folder.
        flags: flags with the metric.

    Attributes:
        values: values of the metric, one for each validation.
        names: names of all metrics in the file.
    """

    def __init__(self, trial: Trial, path: Path, flags: Flags) -> None:
        self.trial, self.path, self.flags = trial, path, flags
        self.values: list[float] = []
        self.names: set[str] = set()
        self.size = 0
        (frozen,) = (t for t in trial.study.get_trials(deepcopy=False) if t.number == trial.number)
        self.reported = set(frozen.intermediate_values)

    def is_hopeless(self) -> bool:
        """Report what was added to the file; return whether the pruner ends the trial."""
        size = self.path.stat().st_size if self.path.exists() else 0
        grown, self.size = size != self.size, size
        return grown and self.read() and self.trial.should_prune()

    def read(self) -> bool:
        """Report new validations; return whether there were any.

        A shared disk may show the size that the file had seconds ago, but opening it shows all.
        """
        lines = read_lines(self.path)
        self.names = set().union(*lines)
        self.values = [line[self.flags.metric] for line in lines if self.flags.metric in line]
        # Count validations, because steps differ between trials with different batch sizes.
        new = {n: v for n, v in enumerate(self.values, 1) if n not in self.reported}
        for number, value in new.items():
            self.trial.report(value, number)
        self.reported |= new.keys()
        return bool(new)

    def best(self) -> float:
        """Return the best value.

        Raises:
            UsageError: the run wrote no such metric.
        """
        if not self.values:
            known = ", ".join(sorted(name for name in self.names if name.startswith("validation/")))
            raise UsageError(
                f"{self.path} has no '{self.flags.metric}': set --metric to a metric that it has: "
                f"{known or 'there is none'}"
            )
        return (max if self.flags.direction == "maximize" else min)(self.values)


def conclude(trial: Trial, code: int, pruned: bool, progress: Progress) -> None:
    """Tell Optuna how a trial ended.

    Raises:
        UsageError: the training succeeded, but did not write the metric.
    """
    study, name = trial.study, run_name(trial.number)
    progress.read()
    if code == EXIT_CODE and pruned:
        log.info("%s: pruned after %d validation(s)", name, len(progress.values))
        study.tell(trial, state=TrialState.PRUNED)
    elif code == 0 and progress.names:
        try:
            value = progress.best()
        except UsageError:
            study.tell(trial, state=TrialState.FAIL)
            raise
        log.info("%s: %s %.4f", name, progress.flags.metric, value)
        study.tell(trial, value)
    else:
        log.error("%s failed: exit code %d and no result", name, code)
        study.tell(trial, state=TrialState.FAIL)


def report(study: optuna.Study, folder: Path, metric: str) -> int:
    """Log the best trial; return 1 if all trials failed, else 0."""
    running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    if running:
        log.info("%d trial(s) still run in other jobs", len(running))
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        if not running:
            log.error(
                "all trials failed: fix what they report, then raise --trials or name a new --study"
            )
        return 0 if running else 1
    best = study.best_trial
    log.info("best is %s, %s %.4f", run_name(best.number), metric, best.value)
    log.info("its settings: %s", " ".join(as_flags(best.params)))
    log.info(
        "train --config %s uses them; %s shows all", folder / "best.yaml", folder / "study.png"
    )
    return 0
