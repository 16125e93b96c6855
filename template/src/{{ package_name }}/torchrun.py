"""torchrun, as we need it: `python -m <package>.torchrun [torchrun's options] -m <package> train`.

It differs in three ways. It passes USR1 and USR2 on to the ranks, which Slurm sends before the
time limit, to every process of a step or to the first alone; torchrun itself would die of them.
After TERM or INT, which it passes on, it gives the ranks time to save. And its exit code is that of
the ranks, so that the batch script can tell 75 (stopped, run me again) from a failure.
"""

import gc
import signal
import sys
from contextlib import suppress
from types import FrameType

import psutil

SAVING_SECONDS = 120
"""how long ranks may take to leave after a signal; torchrun's 30 are few for a checkpoint"""


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Send a signal to the ranks; to one that Slurm has signalled too, it says nothing new."""
    for rank in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


def run() -> None:
    """Run torchrun with this process's arguments."""
    if hasattr(signal, "SIGUSR2"):  # not on Windows
        signal.signal(signal.SIGUSR1, _pass_on)
        signal.signal(signal.SIGUSR2, _pass_on)
    # Until torchrun handles it, Ctrl-C ends this process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Only now: the import takes a second, in which a signal may come.
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError
    from torch.distributed.run import main

    codes: set[int] = set()
    close = PContext.close

    def close_and_note(
        context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30
    ) -> None:
        close(context, death_sig, max(timeout, SAVING_SECONDS))
        handlers = getattr(context, "subprocess_handlers", {})
        codes.update(handler.proc.returncode for handler in handlers.values())

    PContext.close = close_and_note  # type: ignore[method-assign,assignment]
    code = 0
    try:
        main()
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        code = failure.exitcode
    except (SignalException, RendezvousConnectionError):
        # A signal, or the first node's torchrun has left, as its ranks had ended before those of
        # this node. Ranks that all say the same are believed.
        code = codes.pop() if len(codes) == 1 else 1
    # srun sends it when the first node leaves with 75: that must stay our exit code, too.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.freeze()  # at its end, Python would look through all objects of torch's once more
    # Of a rank that a signal killed, the code is negative: say it as a shell does.
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    run()
