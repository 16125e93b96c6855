"""Searches for better settings in trials. Each trial is a training on all ranks.

    python -m <package> sweep [flags] [flags of train] -- LAUNCH COMMAND...

This process is not a rank. It starts the launch command for each trial, so that all ranks get the
same settings, and a crash ends only its own trial. The module `optuna` or `wandb` of this folder
chooses the settings.
"""

import pkgutil
from collections.abc import Sequence
from importlib import import_module


def main(argv: Sequence[str]) -> int:
    """Run trials; return 0, 75 if a signal stopped the search, or 1 if all trials failed.

    Raises:
        UsageError: no launch command, or a mistake in the flags or in the search file.
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    (tool,) = {module.name for module in pkgutil.iter_modules(__path__)} & {"optuna", "wandb"}
    return import_module(f".{tool}", __package__).search(argv[:end], argv[end + 1 :])
