"""Runs the trackers' servers as Slurm jobs: `python -m <package> monitor ACTION [SERVER...]`.

It finds running servers by Slurm's queue and by the records that their jobs write.
"""

from collections.abc import Sequence

from ...engine.config import read_flags
from .. import program
from .flags import Flags


def main(argv: Sequence[str]) -> int:
    """Run an action; return 0, the server's exit code, or 130 after Ctrl-C.

    Raises:
        UsageError: the project has no such server, the server does not support a flag, a job ended
            before its server answered, or Slurm does not answer.
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    flags = read_flags(Flags, argv[:end], program("monitor"))
    from .actions import ACTIONS

    return ACTIONS[flags.action](flags, list(argv[end + 1 :]))
