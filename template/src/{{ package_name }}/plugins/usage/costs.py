"""What a run costs: time, GPU-hours, CPU-hours, energy and memory, over all of its attempts.

Rank 0 of each attempt updates `attempts/N-usage.json` all the time, so that an attempt that is
killed counts, too. This module does not import torch.
"""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Annotated

import psutil
from annotated_types import Ge, Gt, Lt

from ...engine.errors import printable
from ...engine.filesystem import write_atomically
from ...engine.foreign import read_bytes
from ...engine.run.clock import PARTS
from ...engine.run.run_lock import newest

LEAST = 60.0  # seconds of training before advice is given
NAMES = {"data": "waiting for data"}  # names of parts in the log
SPEEDS = {"tflops_per_second": "{:.3g} TFLOP/s of a rank", "mfu_percent": "{:.0f}% MFU"}
# Over the attempts of a run, these values of a rank are added up, or the largest one counts.
ADDED = ("seconds", "cpu_seconds", "data_seconds", "gpu_seconds", "gpu_joules")
LARGEST = ("gib", "node_gib", "gpu_gib")
Number = Annotated[float, Ge(0), Lt(1e12)]  # the file may be another user's, so check the range


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
    cpus: int
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
    workers: int = 0
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


def lines(usage: Usage) -> list[str]:
    """Return log lines with the cost, the time, the speed and the machines of a run, and advice."""
    wall, many = timedelta(seconds=round(usage.wall_seconds)), usage.attempts
    cost = [f"{usage.gpu_hours:.3g} GPU-hours (GPUs: {usage.gpus})"] if usage.gpus else []
    cost += [f"{usage.cpu_hours:.3g} CPU-hours (cores: {usage.cpus})"]
    cost += [f"{usage.gpu_kwh:.3g} kWh by the GPUs"] if usage.gpu_kwh else []
    parts = _parts(usage)
    whole = max(sum(parts.values()), 1e-9)
    shares = [f"{each / whole:.0%} {name}" for name, each in parts.items()]
    speed = [
        SPEEDS[name].format(rate)
        if name in SPEEDS
        else f"{rate:,.0f} {name.replace('_per_', ' a ')}"
        # If two rates are equal, only one is shown: the last, whose name is more specific.
        for rate, name in {rate: name for name, rate in usage.rates.items()}.items()
    ]
    found = [
        f"cost: {wall} in {many} attempt{'s' * (many > 1)}, {', '.join(cost)}",
        f"time: {', '.join(each for each in shares if not each.startswith('0% '))}",
        *([f"speed: {', '.join(speed)}, without validations and checkpoints"] if speed else []),
        *_machines(usage.ranks),
        *([f"advice: {advice}"] if (advice := _advice(usage, parts)) else []),
    ]
    return [printable(line) for line in found]


def _parts(usage: Usage) -> dict[str, float]:
    """Return the seconds of each part by its name in the log.

    In each step, all ranks wait for the slowest one. So the longest wait for data of any rank
    counts as waiting, and not as part of the steps.
    """
    seconds = dict(usage.seconds)
    training = seconds["steps"] + seconds["data"]
    data = max(seconds["data"], *(each.data_seconds for each in usage.ranks), 0.0)
    seconds["data"] = min(data, training)
    seconds["steps"] = training - seconds["data"]
    return {NAMES.get(part) or part: max(seconds[part], 0.0) for part in PARTS}


def _machines(ranks: Sequence[Rank]) -> Iterator[str]:
    """Yield log lines with the use of GPUs, CPUs and memory."""
    if any(each.gpu for each in ranks):
        rank, most = _largest(ranks, "gpu_gib")
        busy = _spread([each.gpu_seconds / each.seconds for each in ranks], "{:.0%}")
        known = f"busy {busy} of the time, " if any(each.gpu_seconds for each in ranks) else ""
        memory = f"{most.gpu_gib:.1f} of {most.gpu_limit_gib:.1f} GiB on rank {rank}"
        yield f"GPUs: {known}memory at most {memory}"
    if ranks:
        cores = _spread([each.cpu_seconds / each.seconds for each in ranks], "{:.1f}")
        (rank, most), (_, node) = _largest(ranks, "gib"), _largest(ranks, "node_gib")
        memory = f"{most.gib:.1f} GiB on rank {rank}"
        if node.node_gib:
            memory = f"{node.node_gib:.1f} of {node.node_limit_gib:.1f} GiB on {node.host}"
        offered = f"{ranks[0].cpus} core{'s' * (ranks[0].cpus > 1)}"
        yield f"CPUs: busy {cores} of {offered} of each rank, memory at most {memory}"


def _advice(usage: Usage, parts: Mapping[str, float]) -> str:
    """Return advice on what to change, or "" if there is none or the training was too short."""
    training, ranks = parts["steps"] + parts[NAMES["data"]], usage.ranks
    if training < LEAST or not ranks:
        return ""
    (rank, slowest), (_, full) = _largest(ranks, "data_seconds"), _largest(ranks, "gpu_gib")
    (_, node), cpus = _largest(ranks, "node_gib"), ranks[0].cpus
    waited = slowest.data_seconds / training
    more = "--workers auto" if usage.workers < cpus - 1 else "more cores for each rank"
    busy = fmean(each.gpu_seconds / each.seconds for each in ranks)
    cores = max(each.cpu_seconds / each.seconds for each in ranks)
    larger, asked = "a larger --batch-size", bool(usage.job)
    known = [
        (waited > 0.15, f"rank {rank} waited {waited:.0%} of the training for data: {more}"),
        (0 < busy < 0.5, f"the GPUs computed {busy:.0%} of the time: {larger} uses them better"),
        (
            0 < full.gpu_gib < full.gpu_limit_gib / 2,
            f"{full.gpu_gib:.1f} of {full.gpu_limit_gib:.1f} GiB of a GPU used: {larger} fits",
        ),
        (asked and cores < cpus / 2, f"{cores:.1f} of {cpus} cores of a rank used: ask for fewer"),
        (
            asked and 0 < node.node_gib < node.node_limit_gib / 4,
            f"{node.node_gib:.1f} of {node.node_limit_gib:.1f} GiB of a node used: ask for less",
        ),
    ]
    return next((advice for holds, advice in known if holds), "")


def _largest(ranks: Sequence[Rank], name: str) -> tuple[int, Rank]:
    return max(enumerate(ranks), key=lambda each: getattr(each[1], name))


def _spread(values: Sequence[float], form: str) -> str:
    """Return the mean over ranks as text, with the minimum and the maximum if they differ."""
    low, mean, high = (form.format(of(values)) for of in (min, fmean, max))
    ranks = values.index(min(values)), values.index(max(values))
    return mean if low == high else f"{mean} ({low} on rank {ranks[0]}, {high} on rank {ranks[1]})"
