"""torchrun, as a Slurm job needs it: `python -m <package>.torchrun [torchrun's options] ...`.

It differs in two ways. USR2, which Slurm sends to every process of a step before the time limit,
is for the ranks: torchrun itself would die of it. And the exit code is that of the rank that
failed first, so that the batch script can tell 75 (stopped, run me again) from a failure.
"""

import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from .preemption import EXIT_CODE


def run() -> None:
    """Run torchrun with this process's arguments."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # A rank that a signal killed has its negative number: say it as a shell does.
        code = failure.exitcode
        sys.exit(code if code >= 0 else 128 - code)
    except SignalException as error:
        # torchrun passed the signal on, and the ranks had their time to save.
        sys.exit(EXIT_CODE if error.sigval == signal.SIGTERM else 128 + error.sigval)


if __name__ == "__main__":
    run()
