"""All private functions of PyTorch that this project uses. Any new version may change them.

Other modules use no private names, except for options whose presence they check first.
"""

import signal
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "note_exit_codes", "record_memory", "save_memory"]


def note_exit_codes(seconds: int) -> set[int]:
    """Let torchrun wait longer for ranks that save after a signal, and note their exit codes.

    Args:
        seconds: the time between a signal and SIGKILL for the ranks; torchrun's default is 30.

    Returns:
        A set, to which the exit codes of the ranks are added after torchrun has ended them. If a
        signal killed a rank, its code is negative.
    """
    # Imported here, since the import takes a second and only torchrun needs it.
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


def record_memory() -> None:
    """Record the newest memory allocations on the GPU, with the Python lines that made them."""
    from torch.cuda import memory

    history: Any = memory
    history._record_memory_history(max_entries=100_000, stacks="python")  # an entry has some KB


def save_memory(path: str) -> None:
    """Write the recorded allocations for pytorch.org/memory_viz, and end the recording."""
    from torch.cuda import memory

    history: Any = memory
    history._dump_snapshot(path)
    history._record_memory_history(enabled=None)
