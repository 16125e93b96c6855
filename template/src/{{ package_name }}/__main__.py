"""The commands of this project: `python -m <package> COMMAND [flags]`.

Commands import torch only once their flags are known to be right, so that `--help` and a
mistyped flag answer at once.
"""

import difflib
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NoReturn

from .engine import errors


def train(argv: Sequence[str]) -> int:
    """Train on this rank; return 0, or 75 if a signal stopped the training."""
    from .engine.ranks.signals import StopRequest, ignore_signals
    from .settings import Settings

    settings = Settings.parse(argv, about="Train the model. ")
    # Before torch is imported, which takes a second: a signal in that second must not kill us.
    stop = StopRequest.install()
    from .trackers.dispatch import left_behind
    from .train import run

    code = run(settings, stop)
    # The launcher sends TERM to the others when the first rank leaves with 75. A rank whose
    # interpreter is shutting down would die of it, and the batch script would not see 75.
    ignore_signals()
    if left_behind():
        # The handlers that a tracker's library registers with atexit may wait or fail.
        sys.stdout.flush()
        os._exit(code)
    return code


def download(argv: Sequence[str]) -> int:
    """Fetch the dataset, as data.py does."""
    from .data import download as fetch
    from .settings import Settings

    fetch(Settings.parse(argv, "download", "Fetch the dataset and verify it. "))
    return 0


# Those of tools/ are a module each, whose `main` takes the flags. A project has some of them.
COMMANDS = {
    "train": "train the model; on one process, or on every rank that torchrun or srun started",
    "download": "fetch the dataset and verify it; run this where there is internet",
    "evaluate": "measure a trained network on a dataset, as the training does",
    "predict": "write what a trained network makes of a dataset",
    "export": "write a trained network as weights or a graph, for other programs",
    "doctor": "check what a job needs: software, Slurm's answers, nodes, data",
    "check-comm": "check that the ranks can talk to each other, and how fast",
    "acceptance": "run each kind of job once on the cluster, to test that it works",
    "runs": "list the runs and how they stand: running, finished, failed, stuck",
    "show": "tell everything about one run on a screen",
    "prune": "remove checkpoints of finished runs, to free space",
    "profile": "show where the time of profiled steps went",
    "plot": "draw the curves of runs to a file",
    "report": "write a page about runs, to look at and to send",
    "monitor": "start and stop the trackers' web servers, as Slurm jobs",
    "check-trackers": "log a small run to every tracker and read it back",
    "sync": "send to the trackers what they missed of a run",
    "sweep": "search for better settings, one trial after another",
}
OWN = {"train": train, "download": download}


def commands() -> dict[str, str]:
    """Return the commands that this project has, each with its line of help."""
    return {name: COMMANDS[name] for name in COMMANDS if name in OWN or find_spec(_module(name))}


def find_command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function that runs a command with its flags and returns the exit code."""
    return OWN[name] if name in OWN else import_module(_module(name)).main


def _module(name: str) -> str:
    return f"{__package__}.tools.{name.replace('-', '_')}"


def load_env() -> None:
    """Set the variables of .env that the environment does not have yet, such as a key."""
    from dotenv import dotenv_values

    try:
        values = dotenv_values(".env")
    except (OSError, ValueError) as error:
        raise errors.UsageError(f"can't read .env: {error}") from None
    for name, value in values.items():
        if value:
            os.environ.setdefault(name, value)


def main() -> None:
    """Run the command that the first argument names.

    Exits 0 on success, 1 on a mistake or a failure, 2 on bad flags, 75 when a signal stopped the
    training after a checkpoint, and 76 when another rank is lost.
    """
    available = commands()
    name, argv = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name in available:
        _run(name, argv)
    usage = f"usage: python -m {__package__} COMMAND [flags]\n\n" + "\n".join(
        f"  {each:16}{text}" for each, text in available.items()
    )
    if name in ("-h", "--help"):
        print(f"{usage}\n\n  COMMAND --help lists a command's flags")
        return
    near = difflib.get_close_matches(name, available, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else ""
    error = f"error: unknown command '{name}'{hint or '; --help lists them'}" if name else usage
    sys.exit(error if errors.is_rank_0() else 1)


def _run(name: str, argv: Sequence[str]) -> NoReturn:
    """Run a command, and exit with its code."""
    shown = logging.StreamHandler()
    shown.setFormatter(errors.PrintableFormatter("%(message)s"))
    logging.basicConfig(handlers=[shown], level=logging.INFO)
    try:
        load_env()
        # A notebook's backend may not be installed here, and no command opens a window.
        os.environ["MPLBACKEND"] = "agg"
        # Python removes what loading workers leave when their rank dies, and warns: not needed.
        filters = os.environ.get("PYTHONWARNINGS", "")
        os.environ["PYTHONWARNINGS"] = f"{filters},ignore:resource_tracker:UserWarning".lstrip(",")
        code = find_command(name)(argv)
        if "triton" not in sys.modules:  # it would report what is frozen as leaks, in 100 lines
            gc.freeze()  # at its end, Python would look through all objects of torch once more
        sys.exit(code)
    except SystemExit as leaving:
        # The user's code may exit, too: that is a failure, except after a stop by a signal (75).
        if leaving.code not in (None, 0, 75):
            said = leaving.code if isinstance(leaving.code, str) else ""
            errors.note_failure(said.partition("\n")[0])
        raise
    except KeyboardInterrupt:  # outside a training, which saves first
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        os._exit(1)  # the reader of the output, such as head, has left
    except Exception as error:
        code = errors.LostRankError.EXIT_CODE if isinstance(error, errors.LostRankError) else 1
        text = "".join(traceback.format_exception(error))
        first = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
        if isinstance(error, errors.UsageError):
            first = text = f"error: {errors.printable(str(error))}"
        elif isinstance(error, ModuleNotFoundError):
            place = traceback.extract_tb(error.__traceback__)[-1]
            first = text = (
                f"error: there is no module {error.name} ({place.filename}, line {place.lineno}): "
                "if the project needs it, run 'make clean-env setup'"
            )
        if code == 1:
            errors.note_failure(first)
        print(errors.printable_lines(text), file=sys.stderr, flush=True)
        sys.stdout.flush()
        # At once: an orderly exit would wait for other ranks, or abort in a thread of Gloo's.
        os._exit(code)


if __name__ == "__main__":
    main()
