"""Runs torchrun: `python -m <package>.engine.torchrun [torchrun's options] -m <package> train`.

It differs from torchrun in five ways:
- If srun starts it without `--rdzv-endpoint`, the nodes meet on the first node, at a port that
  depends on the job and the step. Nodes that do not come within `meet_timeout` are named.
- It passes USR1 and USR2 on to the ranks. Slurm sends them before the time limit, to all processes
  of a step or to the first one alone. They would end torchrun, whose --signals-to-handle needs a
  newer torch, and kills ranks that take long to save.
- After TERM or INT, which torchrun passes on, the ranks have more time to save.
- It takes --numa-binding from NUMA_BINDING, where the job has GPUs.
- Its exit code is that of the ranks, so that the batch script can tell 75 (stopped, run me again)
  from a failure.
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

from .config import DEFAULT_CONFIG, Settings, read_yaml
from .errors import LEFT, LostRankError, UsageError, note_failure
from .filesystem import full_path
from .ranks.environment import Ranks, rendezvous_address, srun_step

SAVING_SECONDS = 120
"""how long ranks may take to save and exit after a signal; torchrun gives them 30"""


def _pass_on(number: int, _frame: FrameType | None) -> None:
    """Send a signal to the ranks. It does not matter if Slurm has sent it to them, too."""
    for rank in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            rank.send_signal(number)


def _meet_nodes() -> object:
    """Let torchrun meet on the first node, once those of all nodes have come.

    Return their store, which torchrun shares if it still exists.

    Raises:
        UsageError: the address is wrong, or some do not come.
    """
    # torchrun's variables are for what it starts.
    slurm = {name: text for name, text in os.environ.items() if name.startswith("SLURM")}
    nodes = Ranks.from_environment(slurm)
    address = rendezvous_address(os.environ)
    sys.argv.insert(1, f"--rdzv-endpoint={address}")
    if nodes.size == 1:
        return None
    from datetime import timedelta

    from .ranks.meeting import join_store, meeting, wait_for_all

    seconds = _meet_timeout()
    sys.argv.insert(1, f"--rdzv-conf=join_timeout={seconds},read_timeout={seconds}")
    limit = timedelta(seconds=seconds)
    with meeting("torchrun", address):
        store = join_store(nodes, address, limit)
        wait_for_all(store, nodes, limit, "torchrun")
    return store


def _meet_timeout() -> int:
    """Return the training's setting; a wrong one is reported by the ranks."""
    flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    flags.add_argument("--config", default=DEFAULT_CONFIG)
    flags.add_argument("--meet-timeout", "--meet_timeout", dest="seconds", nargs="?")
    given, _ = flags.parse_known_args()
    with suppress(UsageError, AttributeError):  # such as without a file
        if given.seconds is None:
            path = Path(full_path("config", str(given.config)))
            given.seconds = read_yaml(path.resolve()).get("meet_timeout", Settings.meet_timeout)
        return Settings.from_values({"meet_timeout": given.seconds}).meet_timeout
    return Settings.meet_timeout


def run() -> None:
    """Run torchrun with this process's arguments."""
    if hasattr(signal, "SIGUSR2"):  # not on Windows
        signal.signal(signal.SIGUSR1, _pass_on)
        signal.signal(signal.SIGUSR2, _pass_on)
    # Until torchrun handles it, Ctrl-C ends this process without a traceback.
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
            sys.exit("error: NUMA_BINDING needs numactl, which is not here: unset it in site.sh")
        sys.argv.insert(1, f"--numa-binding={mode}")
    # Only now: the import takes a second, in which a signal may come.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main

    from .torch_private import note_exit_codes

    codes = note_exit_codes(SAVING_SECONDS)
    try:
        main()
        codes = {0}
    except ChildFailedError as error:
        codes = {error.get_first_failure()[1].exitcode}
    except SignalException as error:
        codes = codes or {128 + error.sigval}
    except RendezvousError as error:
        # If there are codes, the ranks of the first node ended earlier, and its torchrun with them.
        if not codes:
            why = str(error.__cause__ or type(error).__name__).partition("\n")[0]
            here = socket.gethostname()
            said = f"torchrun on {here} can't meet the other nodes: {why}"
            print(f"error: {said}", file=sys.stderr)
            if not LEFT.search(why):
                note_failure(said)
    code = codes.pop() if len(codes) == 1 else 1
    # srun sends TERM when the first node exits with 75. This node must exit with 75, too.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "triton" not in sys.modules:  # it would report what is frozen as leaks, in 100 lines
        gc.freeze()  # at its end, Python would look through all objects of torch once more
    # The code of a rank that a signal killed is negative; a shell adds the signal to 128.
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    run()
