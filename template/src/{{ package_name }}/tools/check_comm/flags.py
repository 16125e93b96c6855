"""The flags of `check-comm`."""

import dataclasses
from pathlib import Path
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Check that the ranks can communicate, and measure how fast.

    The exit code is 0 if all is right. It is 1 if a result was wrong, if a rank was lost or hangs,
    or if the bandwidth is less than --min-gb-s.
    """

    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """auto: cuda or xpu if available, else cpu"""
    backend: Literal["auto", "gloo", "nccl", "xccl"] = "auto"
    """auto: nccl on cuda, xccl on xpu, else gloo"""
    timeout: int = 60
    """seconds after which an operation counts as hung"""
    max_bytes: int = 64 * 2**20
    """size of the largest message"""
    pairs: bool = False
    """also measure each pair of nodes, or of ranks on a single node, to find a slow link"""
    min_gb_s: float = 0
    """fail if all-reduce of the largest message has less bus bandwidth than this"""
    json: Path | None = None
    """file for the results"""
