"""Checks the communication between ranks: whether it works and is correct, and how fast it is."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ...engine.config import Settings, read_flags
from ...engine.errors import UsageError, is_rank_0
from .. import program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Check that the ranks can communicate, and measure how fast.

    The exit code is 0 if all is right, and 1 if an operation fails, hangs or has a wrong result.
    """

    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """auto: cuda or xpu if available, else cpu"""
    backend: Literal["auto", "gloo", "nccl", "xccl"] = "auto"
    """auto: nccl on cuda, xccl on xpu, else gloo"""
    timeout: int = 60
    """seconds after which an operation counts as hung"""
    max_bytes: int = 64 * 2**20
    """size of the largest message; the smallest has 1024 bytes"""
    pairs: bool = False
    """also measure each pair of nodes, or of ranks on a single node, to find a slow link"""
    json: Path | None = None
    """file for the results"""


def main(argv: Sequence[str]) -> int:
    """Check and measure on the ranks that torchrun or srun started; return the exit code.

    Raises:
        UsageError: there is only one rank, two ranks share a GPU, an operation fails, hangs or has
            a wrong result, or the results can't be written.
    """
    flags = read_flags(Flags, argv, program("check-comm"))
    # Imported here because it imports torch, and --help should answer at once.
    from .examine import examine

    given = {name: getattr(flags, name) for name in ("device", "backend", "timeout")}
    report = examine(Settings.from_values(given), flags.max_bytes, flags.pairs)
    if flags.json and is_rank_0():
        try:
            flags.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"can't write the results: {error}") from None
    return 0
