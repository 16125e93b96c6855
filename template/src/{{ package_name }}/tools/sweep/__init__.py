"""A search for better settings: trials, each a training of its own on all ranks.

    python -m <package> sweep [flags] [flags of train] -- LAUNCH COMMAND...

This process is none of the ranks: each trial runs the launch command, so that every rank gets the
same settings, and a trial that crashes does not take the others along. The module beside this one
that is named like a tool, `optuna` or `wandb`, chooses the settings.
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
