"""What a run costs: time, GPU-hours, CPU-hours, energy and memory, over all of its attempts.

Rank 0 of each attempt updates `attempts/N-usage.json` all the time, so that an attempt that is
killed counts, too. This module does not import torch.
"""

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated

import psutil
from annotated_types import Ge, Gt, Lt

from ...engine.filesystem import write_atomically
from ...engine.foreign import read_bytes
from ...engine.run.clock import PARTS
from ...engine.run.run_lock import newest

# Over the attempts of a run, these values of a rank are added up, or the largest one counts.
ADDED = ("seconds", "cpu_seconds", "data_seconds", "gpu_seconds", "gpu_joules")
LARGEST = ("gib", "node_gib", "gpu_gib")
# The file may be another user's, so check the ranges.
Number = Annotated[float, Ge(0), Lt(1e12)]
Count = Annotated[int, Ge(0), Lt(10**9)]


@dataclass
class Rank:
    """The resources that a rank has used since its process began, and those that it may use.

    0 or "" means that a value is unknown.

    Args:
        seconds: the age of its process at the last sample.
        cpus: the number of CPUs that it may use.
        cpu_seconds: the CPU time of the process and its loading workers, over all cores.
        data_seconds: the time for which it waited for batches.
        gib: the largest memory of the process and its loading workers together.
        node_gib: the largest memory of all processes that share the limit `node_limit_gib`.
        gpu: the name of its GPU.
        gpus: the number of GPUs that the job has on this node.
        gpu_seconds: the time in which its GPU computed.
        gpu_joules: the energy that its GPU used.
        gpu_gib: the largest memory that PyTorch reserved on its GPU, which has `gpu_limit_gib`.
    """

    host: str
    seconds: Annotated[float, Gt(0), Lt(1e12)]
    cpus: Count
    cpu_seconds: Number
    data_seconds: Number
    gib: Number
    node_gib: Number
    node_limit_gib: Number
    gpu: str
    gpus: int
    gpu_seconds: Number
    gpu_joules: Number
    gpu_gib: Number
    gpu_limit_gib: Number


@dataclass
class Usage:
    """The usage of an attempt, or of all attempts of a run together.

    Args:
        began, until: in seconds since 1970. An attempt in a batch script begins when its job
            starts, or when the previous attempt in the job ends.
        attempts: the number of attempts.
        wall_seconds: the wall time.
        cpu_hours, gpu_hours: the wall time times the CPUs and GPUs that Slurm gave the job.
        gpu_kwh: the energy of the GPUs, as far as it is known.
        seconds: the wall time of rank 0 by part (clock.py).
        nodes, cpus, gpus: the numbers that Slurm gave the job, over all nodes.
        job: the Slurm job id.
        workers: the number of loading workers of each rank.
        options: the options of sbatch, without time, that the next job may change.
        task_cpus: the CPUs of each of the job's tasks.
        limit_seconds: the time limit of the job; 0 if it is unknown.
        lead_seconds: how long before this limit Slurm signals the ranks.
        ranks: the usage of each rank.
        rates: the speed of the training, such as {"samples_per_second": 1234.5}.
    """

    began: Number
    until: Number = 0
    attempts: int = 1
    wall_seconds: Number = 0
    cpu_hours: Number = 0
    gpu_hours: Number = 0
    gpu_kwh: Number = 0
    seconds: dict[str, Number] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    nodes: int = 1
    cpus: int = 1
    gpus: int = 0
    job: str | None = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID"))
    workers: Count = 0
    options: list[str] = field(default_factory=list)
    task_cpus: Count = 0
    limit_seconds: Number = 0
    lead_seconds: Number = 0
    ranks: list[Rank] = field(default_factory=list)
    rates: dict[str, Number] = field(default_factory=dict)


class UsageFile:
    """The usage of this attempt, which rank 0 writes to `attempts/` of its run folder."""

    def __init__(self, run_dir: Path, workers: int) -> None:
        folder = run_dir / "attempts"
        self.path = folder / f"{newest(folder)}-usage.json"
        own, before = psutil.Process().create_time(), total(run_dir)
        # The time of the batch script before it started the ranks also costs. But several trials of
        # a sweep share it, so it counts for none of them.
        paid = "PAID_SINCE" in os.environ and "SWEEP_TRIAL" not in os.environ
        since = min(float(os.environ["PAID_SINCE"]), own) if paid else own
        if before:  # the clock of the node on which the last attempt ran may be ahead
            since = min(max(since, before.until), time.time())
        self.usage = Usage(since, workers=workers)
        if paid:
            self.usage.options = os.environ.get("NEXT_OPTIONS", "").split()
            self.usage.task_cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", 0))
            self.usage.limit_seconds = float(os.environ.get("TIME_LIMIT") or 0)
            self.usage.lead_seconds = float(os.environ.get("SIGNAL_LEAD") or 0)

    def write(
        self, ranks: Sequence[Rank], rates: Mapping[str, float], seconds: Mapping[str, float]
    ) -> None:
        """Write the usage until now; ignore errors, such as a full disk.

        Args:
            ranks, rates: as in `Usage`.
            seconds: by part, since the clock of this process started.
        """
        usage, now, hosts = self.usage, time.time(), [each.host for each in ranks if each.gpu]
        gpus = {each.host: max(each.gpus, hosts.count(each.host)) for each in ranks}
        # The value is a list such as 4(x2),8: two nodes with 4 CPUs, one with 8.
        given = re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
        usage.cpus = sum(int(cpus) * int(times or 1) for cpus, times in given)
        usage.cpus = usage.cpus or sum(each.cpus for each in ranks)
        usage.nodes, usage.gpus = len(gpus), sum(gpus.values())
        usage.ranks, usage.rates = list(ranks), dict(rates)
        wall = max(now - usage.began, sum(seconds.values()))  # the system clock may be set back
        usage.until, usage.wall_seconds = now, wall
        usage.cpu_hours, usage.gpu_hours = (n * wall / 3600 for n in (usage.cpus, usage.gpus))
        usage.gpu_kwh = sum(each.gpu_joules for each in ranks) / 3.6e6
        before = wall - sum(seconds.values())  # the batch script, and the start of Python
        usage.seconds = {**seconds, "starting": seconds["starting"] + before}
        with suppress(OSError):
            write_atomically(self.path, json.dumps(asdict(usage), indent=2) + "\n")


def total(run_dir: Path) -> Usage | None:
    """Return the usage of all attempts of a run together, None if it is unknown.

    Values of the job, such as `nodes`, are those of the newest attempt. Damaged files are ignored.
    """
    attempts = list(read(run_dir).values())
    if not attempts:
        return None
    result = replace(attempts[-1], began=attempts[0].began, attempts=len(attempts))
    for name in ("wall_seconds", "cpu_hours", "gpu_hours", "gpu_kwh"):
        setattr(result, name, sum(getattr(each, name) for each in attempts))
    result.seconds = {part: sum(each.seconds[part] for each in attempts) for part in PARTS}
    if len({len(each.ranks) for each in attempts}) > 1:
        result.limit_seconds = 0  # times with other numbers of ranks do not add up to a need
    result.ranks = [
        _merged([each.ranks[rank] for each in attempts if rank < len(each.ranks)])
        for rank in range(max(len(each.ranks) for each in attempts))
    ]
    return result


def read(run_dir: Path) -> dict[int, Usage]:
    """Return the usage of each attempt of a run by its number, in order."""
    from pydantic import TypeAdapter

    names = [path.name.split("-")[0] for path in (run_dir / "attempts").glob("*-usage.json")]
    found, adapter = {}, TypeAdapter(Usage)
    for number in sorted(int(name) for name in names if name.isdecimal()):
        with suppress(OSError, ValueError):
            content = read_bytes(run_dir / "attempts" / f"{number}-usage.json")
            usage = adapter.validate_json(content)
            if usage.seconds.keys() == set(PARTS):
                found[number] = usage
    return found


def _merged(attempts: Sequence[Rank]) -> Rank:
    """Return the usage of a rank over several attempts."""
    of = {name: [getattr(each, name) for each in attempts] for name in (*ADDED, *LARGEST)}
    return replace(attempts[-1], **{n: (sum if n in ADDED else max)(of[n]) for n in of})
