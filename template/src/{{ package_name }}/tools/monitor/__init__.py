"""Servers of the trackers as Slurm jobs: `python -m <package> monitor ACTION [SERVER...]`.

Which servers run is read from Slurm's queue and from the records that their jobs write.
"""

from collections.abc import Sequence

from ...engine.config import read_flags
from .. import program
from .flags import Flags


def main(argv: Sequence[str]) -> int:
    """Do what the first word says; return 0, the server's own code, or 130 after Ctrl-C.

    Raises:
        UsageError: a server that the project has not, flags that do not fit, a job that ended
            before its server answered, or a Slurm that does not answer.
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    flags = read_flags(Flags, argv[:end], program("monitor"))
    from .actions import ACTIONS

    return ACTIONS[flags.action](flags, list(argv[end + 1 :]))
