"""Runs torchrun: `python -m <package>.tools.torchrun [torchrun's options] -m <package> train`.

It differs from torchrun in five ways:
- If srun starts it without `--rdzv-endpoint`, the nodes meet on the first node, at a port that
  depends on the job and the step. If nodes are missing after `meet_timeout`, an error names them.
- It passes the signals USR1 and USR2 on to the ranks. Slurm sends them before the time limit, to
  all processes of a step or only to the first one. They would end the original torchrun. Its option
  --signals-to-handle needs a newer torch, and kills ranks that take long to save.
- torchrun passes on TERM and INT. Here, the ranks then have more time to save.
- If the job has GPUs, the variable NUMA_BINDING sets the option --numa-binding.
- Its exit code is that of the ranks. So the batch script can tell 75 (stopped by a signal, to be
  run again) from a failure.
"""

import argparse
import gc
import os
import shutil
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from ..engine.config import DEFAULT_CONFIG, Settings, full_path, read_yaml
from ..engine.errors import LEFT, LostRankError, UsageError, note_failure
from ..engine.ranks.environment import Ranks, rendezvous_address, srun_step

SAVING_SECONDS = 120
"""seconds that ranks have to save and exit after a signal; torchrun's default is 30"""


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Send a signal to the ranks. If Slurm has sent it to them too, the second one does no harm."""
    for rank in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


def _meet_nodes() -> object:
    """Wait for the torchrun processes of all nodes, and let them meet on the first node.

    Returns:
        The store on which they met; None with one node. torchrun uses the same store, so the caller
        must keep a reference to it.

    Raises:
        UsageError: the address is wrong, or some nodes do not connect.
    """
    # RANK and similar variables, if they are set, are not those of torchrun itself.
    slurm = {name: text for name, text in os.environ.items() if name.startswith("SLURM")}
    nodes = Ranks.from_environment(slurm)
    address = rendezvous_address(os.environ)
    sys.argv.insert(1, f"--rdzv-endpoint={address}")
    if nodes.size == 1:
        return None
    from datetime import timedelta

    from ..engine.ranks.meeting import join_store, meeting, wait_for_all

    seconds = _meet_timeout()
    sys.argv.insert(1, f"--rdzv-conf=join_timeout={seconds},read_timeout={seconds}")
    limit = timedelta(seconds=seconds)
    with meeting("torchrun", address):
        store = join_store(nodes, address, limit)
        wait_for_all(store, nodes, limit, "torchrun")
    return store


def _meet_timeout() -> int:
    """Return `meet_timeout` from the flags or the YAML file, in seconds.

    If the value is wrong, return the default: the ranks report the error.
    """
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--config", default=DEFAULT_CONFIG)
    flags.add_argument("--meet-timeout", "--meet_timeout", dest="seconds", nargs="?")
    given, _ = flags.parse_known_args()
    with suppress(UsageError, AttributeError):  # for example, there is no file
        if given.seconds is None:
            path = Path(full_path("config", str(given.config)))
            given.seconds = read_yaml(path.resolve()).get("meet_timeout", Settings.meet_timeout)
        return Settings.from_values({"meet_timeout": given.seconds}).meet_timeout
    return Settings.meet_timeout


def note_exit_codes(seconds: int) -> set[int]:
    """Let torchrun wait longer for ranks that save after a signal, and note their exit codes.

    Args:
        seconds: the time between a signal and SIGKILL for the ranks; torchrun's default is 30.

    Returns:
        A set, to which the exit codes of the ranks are added after torchrun has ended them. If a
        signal killed a rank, its code is negative.
    """
    # The import takes a second.
    from torch.distributed.elastic.multiprocessing.api import PContext

    codes: set[int] = set()
    close = PContext.close

    def close_and_note(
        context: PContext, death_sig: signal.Signals | None = None, timeout: int = 30
    ) -> None:
        close(context, death_sig, max(timeout, seconds))
        handlers = getattr(context, "subprocess_handlers", {})
        codes.update(handler.proc.returncode for handler in handlers.values())

    PContext.close = close_and_note  # type: ignore[method-assign,assignment]
    return codes


def run() -> None:
    """Run torchrun with this process's arguments."""
    if hasattr(signal, "SIGUSR2"):  # not on Windows
        signal.signal(signal.SIGUSR1, _pass_on)
        signal.signal(signal.SIGUSR2, _pass_on)
    # Until torchrun handles Ctrl-C, it should end this process without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if srun_step(os.environ) is not None and not any("-endpoint" in word for word in sys.argv):
        try:
            _shared = _meet_nodes()
        except UsageError as error:
            if not isinstance(error, LostRankError):
                note_failure(str(error))
            sys.exit(f"error: {error}")
    mode, gpus = os.environ.get("NUMA_BINDING"), os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if mode and gpus != "0":
        if not shutil.which("numactl"):
            sys.exit(
                "error: NUMA_BINDING needs numactl, which is missing: unset it in slurm/site.sh"
            )
        sys.argv.insert(1, f"--numa-binding={mode}")
    # Imported after the signal handlers are set: the import takes a second.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main

    codes = note_exit_codes(SAVING_SECONDS)
    try:
        main()
        codes = {0}
    except ChildFailedError as error:
        codes = {error.get_first_failure()[1].exitcode}
    except SignalException as error:
        codes = codes or {128 + error.sigval}
    except RendezvousError as error:
        # If there are exit codes, the ranks and the torchrun of the first node have ended before.
        # Then the meeting itself has not failed.
        if not codes:
            why = str(error.__cause__ or type(error).__name__).partition("\n")[0]
            here = socket.gethostname()
            said = f"torchrun on {here} can't meet the other nodes: {why}"
            print(f"error: {said}", file=sys.stderr)
            if not LEFT.search(why):
                note_failure(said)
    code = codes.pop() if len(codes) == 1 else 1
    # srun sends TERM to the other nodes when one node exits with 75. They must exit with 75, too.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "triton" not in sys.modules:  # triton would report frozen objects as leaks, in 100 lines
        gc.freeze()  # a faster exit: Python does not search all objects of torch for garbage
    # If a signal killed a rank, its exit code is minus the signal; shells expect 128 + signal.
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    run()
