"""A search for better settings with Optuna: one trial after another, each a training of its own.

    python -m <package> sweep [flags] [flags of train] -- LAUNCH COMMAND...

This process is none of the ranks: for each trial it runs the launch command, so that every rank
gets the same settings, and a trial that crashes does not take the others along.
"""

import dataclasses
import json
import logging
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
import tyro
import yaml
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from .config import Settings, parse, validated
from .errors import UsageError
from .preemption import EXIT_CODE, StopRequest

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Search for the settings with the best validation accuracy.

    Flags of train may follow, and after -- the command that starts the training. A sweep that was
    stopped goes on with the same command. One job at a time may work at a study.
    """

    trials: int = 20
    """number of trials in all, with those of earlier runs of the study"""
    study: str = "sweep"
    """name of the study: its trials and its journal are in RUN_ROOT/STUDY"""
    search: Path = Path("configs/sweep.yaml")
    """file that says which settings to search, and where"""


def main(argv: Sequence[str]) -> int:
    """Run trials until there are enough; return 0, 75 if a signal stopped one, 1 if all failed.

    Raises:
        UsageError: no launch command, or a mistake in the search file or in the settings.
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    own, command = list(argv[:end]), list(argv[end + 1 :])
    flags, train_flags = tyro.cli(
        Flags, args=own, return_unknown_args=True, prog=f"python -m {__package__} sweep"
    )
    if not command:
        raise UsageError("no launch command: end with '-- COMMAND', such as -- srun ... train")
    settings = parse(train_flags, prog="sweep")
    space = search_space(flags.search)
    folder = Path(settings.run_root, flags.study)
    folder.mkdir(parents=True, exist_ok=True)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        # A file that is only appended to is safe on shared file systems; SQLite is not.
        storage=JournalStorage(JournalFileBackend(str(folder / "journal.log"))),
        study_name=flags.study,
        direction="maximize",
        load_if_exists=True,
    )
    stop = StopRequest.install()
    launch = [*command, *train_flags, f"--experiment={flags.study}"]
    while True:
        ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.FAIL))
        if len(ended) >= flags.trials:
            break
        number, params = next_trial(study, space)
        run_dir = folder / f"trial-{number:04}"
        log.info("%s, until there are %d: %s", run_dir.name, flags.trials, as_flags(params))
        code = run([*launch, *as_flags(params).split(), f"--run-dir={run_dir}"], stop)
        if code == EXIT_CODE:
            log.warning("%s was stopped; the same command goes on with it", run_dir.name)
            return EXIT_CODE
        accuracy = validation_accuracy(run_dir) if code == 0 else None
        if accuracy is None:
            log.error("%s failed: exit code %d and no summary.json", run_dir.name, code)
            study.tell(number, state=TrialState.FAIL)
        else:
            log.info("%s: validation accuracy %.4f", run_dir.name, accuracy)
            study.tell(number, accuracy)
    if not study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        log.error("all trials failed")
        return 1
    best = study.best_trial
    log.info("best is trial-%04d, validation accuracy %.4f", best.number, best.value)
    log.info("its settings: %s", as_flags(best.params))
    return 0


def search_space(path: Path) -> dict[str, BaseDistribution]:
    """Return what the search file says: for each setting a list of choices, or low and high.

    Raises:
        UsageError: the file can't be read, or a setting or a value in it is wrong.
    """
    try:
        wanted = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"can't read the search space: {' '.join(str(error).split())}") from None
    if not isinstance(wanted, dict):
        raise UsageError(f"{path} names no setting to search: add one, such as lr: [0.05, 0.1]")
    space = {}
    for name, spec in wanted.items():
        if name not in [field.name for field in dataclasses.fields(Settings)]:
            raise UsageError(f"{path}: unknown setting '{name}'; see train --help for all")
        try:
            values = spec if isinstance(spec, list) else [spec["low"], spec["high"]]
            # Checked as a setting is, and of the setting's type: '1e-3' is text in YAML.
            values = [getattr(validated({name: value}, f"{path}: "), name) for value in values]
            if isinstance(spec, list):
                space[name] = CategoricalDistribution(values)
            else:
                whole = all(isinstance(value, int) for value in values)
                kind = IntDistribution if whole else FloatDistribution
                space[name] = kind(*values, log=spec.get("log", False))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{path}: {name} is {spec!r} ({error}): give a list of choices, or low, high and "
                "perhaps log"
            ) from None
    return space


def next_trial(
    study: optuna.Study, space: dict[str, BaseDistribution]
) -> tuple[int, dict[str, Any]]:
    """Return number and settings of the trial to run: one that was stopped, else a new one."""
    for left in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        if left.params.keys() == space.keys():
            return left.number, left.params
        # Stopped before it had its settings, or of another search space.
        study.tell(left.number, state=TrialState.FAIL)
    trial = study.ask(space)
    return trial.number, trial.params


def run(command: Sequence[str], stop: StopRequest) -> int:
    """Run a command to its end and return its exit code; pass on the first signal that comes.

    It is passed on as USR2, whatever it was: on TERM srun would kill the ranks, and INT it keeps
    to itself. The command has a session of its own, so that it does not get Ctrl-C twice.
    """
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    told = False
    while True:
        try:
            return process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            if stop.received and not told:
                process.send_signal(signal.SIGUSR2)
                told = True


def as_flags(params: Mapping[str, Any]) -> str:
    """Return settings as flags of train."""
    words = []
    for name, value in params.items():
        name = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words.append(f"--{name}={value}")
    return " ".join(words)


def validation_accuracy(run_dir: Path) -> float | None:
    """Return what the finished run says of itself, None if it left nothing."""
    try:
        return json.loads((run_dir / "summary.json").read_text())["validation_accuracy"]
    except FileNotFoundError:
        return None
