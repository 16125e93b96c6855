"""Sends log lines to the terminal and to log.txt in the run folder, with a prefix.

logger.py makes the lines of metrics, and messages.py those of the start.
"""

import logging
from logging.handlers import MemoryHandler
from pathlib import Path

from ..errors import PrintableFormatter, without_secrets
from ..foreign import open_regular, read_bytes
from ..ranks.world import World


def set_up_logging(world: World, all_ranks: bool) -> None:
    """Log to the terminal, with the rank as a prefix.

    Ranks other than 0 log only warnings and errors, unless `all_ranks` is true.
    """
    level = logging.INFO if world.is_main or all_ranks else logging.WARNING
    shown = logging.StreamHandler()
    shown.setFormatter(
        PrintableFormatter(f"%(asctime)s [rank {world.rank}] %(message)s", "%H:%M:%S")
    )
    logging.basicConfig(level=level, handlers=[shown], force=True)
    if world.is_main:
        # This handler keeps the lines until `log_to_file` opens the file.
        logging.getLogger().addHandler(MemoryHandler(capacity=0))
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it would log the fonts it finds


def log_to_file(path: Path) -> logging.Handler:
    """Append log lines to a file, too, first those that were logged before.

    If the disk is full, lines are lost.

    Raises:
        OSError: the file can't be opened.
    """
    file = logging.StreamHandler(open_regular(path, "a"))
    file.setFormatter(PrintableFormatter("%(asctime)s %(message)s"))
    file.handleError = lambda record: None  # type: ignore[method-assign]
    (memory,) = (each for each in logging.getLogger().handlers if isinstance(each, MemoryHandler))
    memory.setTarget(file)
    memory.flush()
    return memory


def read_log(folder: Path) -> str:
    """Return the content of log.txt for a tracker: at most its last 4 MiB, without secrets.

    Raises:
        OSError: the file can't be read.
    """
    text = read_bytes(folder / "log.txt", 2**22, last=True).decode(errors="replace")
    return without_secrets(text)
