"""The commands of this project: `python -m <package> COMMAND [flags]`.

A command imports torch only after it has checked its flags, so that `--help` and the error for a
mistyped flag appear at once.
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
    # Before the import of torch: it takes a second, in which a signal must not kill the process.
    stop = StopRequest.install()
    # Torch then asks for huge pages for large tensors, since each batch of images is new memory.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    try:
        from .trackers.dispatch import left_behind
        from .train import run

        code = run(settings, stop)
    except SystemExit as leaving:
        if leaving.code in (None, 0, 75):  # of the user's code; Slurm would take it for a success
            raise RuntimeError(f"exit({leaving.code or ''}) was called in a training") from leaving
        raise
    # When the first rank exits with 75, the launcher sends SIGTERM to the others. It would kill a
    # rank whose interpreter is shutting down, and the batch script would not get exit code 75.
    ignore_signals()
    if left_behind():
        # Skip the handlers that a tracker's library registered with atexit: they may hang or fail.
        sys.stdout.flush()
        os._exit(code)
    return code


def download(argv: Sequence[str]) -> int:
    """Download the dataset with `download` in data.py; return 0."""
    from .data import download as fetch
    from .settings import Settings

    fetch(Settings.parse(argv, "download", "Download the dataset and verify it. "))
    return 0


# All commands with their lines of help. Each command but `train` and `download` is the function
# `main` of its module in tools/. A project has only the modules that its answers chose. To add a
# command, add its module there and a line here.
COMMANDS = {
    "train": "train the model in one process, or in every rank that torchrun or srun started",
    "download": "download the dataset and verify it; needs internet access",
    "evaluate": "measure the metrics of a trained network on a dataset",
    "predict": "write the predictions of a trained network for a dataset",
    "export": "write a trained network as weights or a graph, for other programs",
    "doctor": "check what a job needs: software, Slurm, nodes, data",
    "check-comm": "check the communication between the ranks, and measure its speed",
    "acceptance": "run each kind of job once on the cluster, to test that it works",
    "runs": "list the runs and their states",
    "costs": "add up the hours and the energy of runs",
    "prune": "remove checkpoints of finished runs, to free space",
    "profile": "show where the time of profiled steps went",
    "report": "write a page about runs that you can read and send, or draw their curves",
    "monitor": "start and stop the trackers' web servers as Slurm jobs",
    "check-trackers": "log a small run to every tracker and read it back",
    "sync": "send the trackers what they missed of a run",
    "sweep": "search for better settings, one trial after another",
}
# The answers that decide whether a project has a command; for the others, it is `tools`.
ANSWERS = {
    "monitor": "monitoring_servers",
    "check-trackers": "trackers",
    "sync": "trackers",
    "sweep": "sweep",
}
OWN = {"train": train, "download": download}


def commands() -> dict[str, str]:
    """Return the commands that this project has, with their lines of help."""
    return {name: COMMANDS[name] for name in COMMANDS if name in OWN or find_spec(_module(name))}


def find_command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the function of a command: it takes the flags and returns the exit code."""
    return OWN[name] if name in OWN else import_module(_module(name)).main


def _module(name: str) -> str:
    return f"{__package__}.tools.{name.replace('-', '_')}"


def load_env() -> None:
    """Set the variables of .env that the environment does not have, such as a tracker's key."""
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

    The exit code is 0 after success, 1 after an error, 2 after wrong flags, 75 if a signal stopped
    the training and a checkpoint was saved, and 76 if another rank was lost.
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
        absent = [f"{x} ({ANSWERS.get(x, 'tools')})" for x in COMMANDS if x not in available]
        if absent:
            print(
                f"\n  not in this project: {', '.join(absent)}\n  To add one, add it to what the "
                "answer in parentheses has now, as docs/updates.md says:\n  "
                "make update ARGS=\"--data 'tools=[..., report]'\""
            )
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
        # No command opens a window. MPLBACKEND may name a notebook's backend that is not installed.
        os.environ["MPLBACKEND"] = "agg"
        # When a rank dies, Python removes the shared memory of its loading workers and warns about
        # it. Users need not see this warning.
        filters = os.environ.get("PYTHONWARNINGS", "")
        os.environ["PYTHONWARNINGS"] = f"{filters},ignore:resource_tracker:UserWarning".lstrip(",")
        code = find_command(name)(argv)
        if "triton" not in sys.modules:  # triton would report frozen objects as leaks, in 100 lines
            gc.freeze()  # a faster exit: Python does not search all objects of torch again
        sys.exit(code)
    except SystemExit as leaving:
        # An exit by the user's code is a failure. Exit code 75 follows a stop by a signal.
        if leaving.code not in (None, 0, 75):
            said = leaving.code if isinstance(leaving.code, str) else ""
            errors.note_failure(said.partition("\n")[0])
        raise
    except KeyboardInterrupt:  # not in a training, which handles SIGINT and saves first
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError:
        os._exit(1)  # the reader of the output, such as `head`, has exited
    except Exception as error:
        code = errors.LostRankError.EXIT_CODE if isinstance(error, errors.LostRankError) else 1
        text = "".join(traceback.format_exception(error))
        first = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(": ")
        if isinstance(error, errors.UsageError):
            first = text = f"error: {errors.printable(str(error))}"
        elif isinstance(error, ModuleNotFoundError):
            place = traceback.extract_tb(error.__traceback__)[-1]
            first = text = (
                f"error: module {error.name} is missing ({place.filename}, line {place.lineno}): "
                "if the project needs it, run 'make clean-env setup'"
            )
        if code == 1:
            errors.note_failure(first)
        print(errors.printable_lines(text), file=sys.stderr, flush=True)
        sys.stdout.flush()
        # Exit at once: a normal exit would wait for other ranks, or abort in a thread of Gloo.
        os._exit(code)


if __name__ == "__main__":
    main()
