"""Checks the communication between ranks: whether it works, is correct, and how fast it is.

This module prints the results and gives the verdict; each rank runs examine.py.
"""

import json
import os
import signal
from collections.abc import Sequence
from typing import Any

from ...engine.config import read_flags
from ...engine.errors import UsageError
from ...engine.ranks.environment import Ranks
from .. import program
from .flags import Flags

RIGHT = "all is right"
SLOW = 0.5  # share of the upper quartile of bandwidth, below which a pair is slow


def main(argv: Sequence[str]) -> int:
    """Check and measure on the ranks that torchrun or srun started; return the exit code.

    Raises:
        UsageError: a flag is out of range, there is only one rank, two ranks share a GPU, a rank
            was lost or hangs, or the results can't be written.
    """
    flags = read_flags(Flags, argv, program("check-comm"))
    if flags.max_bytes < 1:
        raise UsageError(f"max_bytes is {flags.max_bytes}: it should be 1 or more")
    ranks = Ranks.from_environment(os.environ)
    if ranks.size == 1:
        raise UsageError(
            "check-comm needs two ranks or more, and there is only one: start it with srun or "
            "torchrun, as slurm/check_comm.sbatch does"
        )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    # Here, because it imports torch, and --help should answer at once.
    from .examine import examine

    report: dict[str, Any] = {"verdict": "not finished", "ranks": [], "faults": 0, "speed": []}
    try:
        examine(flags, ranks, report)
        report["verdict"] = verdict(report, flags.min_gb_s)
    finally:
        # Also after an error or a signal, with the results so far.
        if ranks.rank == 0 and report["speed"]:
            show(report)
            try:
                if flags.json:
                    flags.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
            except OSError as error:
                raise UsageError(f"can't write the results: {error}") from None
    return int(report["verdict"] != RIGHT)


def verdict(report: dict[str, Any], min_gb_s: float) -> str:
    """Return what is wrong with the results as one line, or RIGHT."""
    problems = []
    if report["faults"]:
        problems.append(f"{report['faults']} wrong results")
    reached = [row for row in report["speed"] if row["operation"] == "all-reduce"][-1]
    if reached["bus_gb_s"] < min_gb_s:
        problems.append(
            f"all-reduce of {reached['bytes']} bytes has a bus bandwidth of "
            f"{reached['bus_gb_s']:.3f} GB/s, less than the {min_gb_s:g} asked for"
        )
    return "; ".join(problems) or RIGHT


def mark_slow(pairs: list[dict[str, Any]]) -> None:
    """Mark the pairs with less than half of the upper quartile of bandwidth.

    The median is too low: one bad node out of three makes two of three pairs slow.
    """
    speeds = sorted(pair["gb_s"] for pair in pairs)
    for pair in pairs:
        pair["slow"] = pair["gb_s"] < SLOW * speeds[len(speeds) * 3 // 4]


def show(report: dict[str, Any]) -> None:
    """Print the results, with the slow pairs marked."""
    for place in report["ranks"]:
        print("rank {rank} on {host}, local rank {local_rank}: {device}, {facts}".format(**place))
    print(f"\n{'operation':16}{'bytes':>12}{'µs':>12}{'algorithm GB/s':>16}{'bus GB/s':>12}")
    for row in report["speed"]:
        print("{:16}{:>12}{:>12.1f}{:>16.3f}{:>12.3f}".format(*row.values()))
    if pairs := report.get("pairs", []):
        mark_slow(pairs)
        print(f"\n{'ranks':12}{'latency µs':>12}{'GB/s':>12}  nodes")
    for pair in pairs:
        ranks, hosts = "{} - {}".format(*pair["ranks"]), "{} - {}".format(*pair["hosts"])
        mark = "  SLOW" if pair["slow"] else ""
        print(f"{ranks:12}{pair['microseconds']:>12.1f}{pair['gb_s']:>12.3f}  {hosts}{mark}")
    if len(pairs) == 1:
        print("(a single pair can't be compared)")
    said = ("" if report["verdict"] == RIGHT else "FAILED: ") + report["verdict"]
    print(f"\n{len(report['ranks'])} ranks on {report['backend']}: {said}", flush=True)
