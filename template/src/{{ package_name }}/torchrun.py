"""torchrun, as we need it: `python -m <package>.torchrun [torchrun's options] -m <package> train`.

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
    if hasattr(signal, "SIGUSR2"):  # not on Windows
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    code = 0
    try:
        main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # A rank that a signal killed has its negative number: say it as a shell does.
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as error:
        # torchrun passed the signal on, and the ranks had their time to save.
        asked = error.sigval in (signal.SIGTERM, signal.SIGINT)
        code = EXIT_CODE if asked else 128 + error.sigval
    # srun sends it when the first node leaves with 75: that must stay our exit code, too.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    run()
