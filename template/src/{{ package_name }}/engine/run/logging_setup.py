"""Where log lines go, and what they look like: the terminal, and log.txt in the run folder."""

import logging
from logging.handlers import MemoryHandler
from pathlib import Path

from ..errors import PrintableFormatter
from ..filesystem import open_regular, read_bytes
from ..ranks.world import World


def set_up_logging(world: World, all_ranks: bool) -> None:
    """Prefix log lines with the rank; let rank 0 alone speak below warnings, or all ranks."""
    level = logging.INFO if world.is_main or all_ranks else logging.WARNING
    shown = logging.StreamHandler()
    shown.setFormatter(
        PrintableFormatter(f"%(asctime)s [rank {world.rank}] %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=level, handlers=[shown], force=True)
    if world.is_main:
        # Keeps what is said until the run folder has a file for it (logger.py).
        logging.getLogger().addHandler(MemoryHandler(capacity=0))
    # It logs the fonts that it finds.
    logging.getLogger("matplotlib").setLevel(logging.WARNING)


def log_to_file(path: Path) -> logging.Handler:
    """Append what is logged to a file, too, and what was logged before; a full disk loses some.

    Raises:
        OSError: it can't be written, as `open_regular` says.
    """
    file = logging.StreamHandler(open_regular(path, "a"))
    file.setFormatter(PrintableFormatter("%(asctime)s %(message)s"))
    file.handleError = lambda record: None  # type: ignore[method-assign]
    (memory,) = (each for each in logging.getLogger().handlers if isinstance(each, MemoryHandler))
    memory.setTarget(file)
    memory.flush()
    return memory


def read_log(folder: Path) -> str:
    """Return what is in log.txt; of a very long one, the end.

    Raises:
        OSError: it can't be read, as `open_regular` says.
    """
    return read_bytes(folder / "log.txt", 2**22, last=True).decode(errors="replace")
