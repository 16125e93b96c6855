"""What this project uses of PyTorch although PyTorch may change it in any version.

No other module uses such names, but for options that it looks for before it uses them.
"""

import signal
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "note_exit_codes", "record_memory", "save_memory"]


def note_exit_codes(seconds: int) -> set[int]:
    """Let torchrun wait longer for ranks that save after a signal, and note how they end.

    Args:
        seconds: that ranks have between a signal and SIGKILL; torchrun gives them 30.

    Returns:
        A set to which the exit codes of the ranks are added when torchrun has ended them; that of
        a rank that a signal killed is negative.
    """
    # Imported here: it takes a second, and only torchrun needs it.
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
    """Record the newest allocations on the GPU, with the lines of Python that made them."""
    from torch.cuda import memory

    history: Any = memory
    history._record_memory_history(max_entries=100_000, stacks="python")  # each takes some KB


def save_memory(path: str) -> None:
    """Write what was recorded for pytorch.org/memory_viz, and end the recording."""
    from torch.cuda import memory

    history: Any = memory
    history._dump_snapshot(path)
    history._record_memory_history(enabled=None)
