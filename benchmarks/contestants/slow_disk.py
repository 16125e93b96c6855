"""A shared file system that takes a millisecond to open a file, one file after the other.

    python slow_disk.py FOLDER MOUNT

This shows FOLDER at MOUNT until it is unmounted, and then prints how many files were opened. The
kernel keeps names and contents, as on a node that has already read them.
"""

import sys
import time
from pathlib import Path

import mfusepy

sys.path.append(str(Path(__file__).parents[2] / "tests" / "run"))
from shared_disk import Node

SECONDS = 0.001


class SlowNode(Node):
    """A node's view of a folder, which waits for each open."""

    opened = 0

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        """Open a file."""
        time.sleep(SECONDS)
        self.opened += 1
        return super().open(path, flags, mode)


node = SlowNode(sys.argv[1])
kept = dict.fromkeys(("attr_timeout", "entry_timeout", "negative_timeout"), 600)
mfusepy.FUSE(node, sys.argv[2], foreground=True, nothreads=True, kernel_cache=True, **kept)
print(node.opened)
