"""Says what a run cost, where its time went, and what to change, for the end of the log.

This module does not import torch.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from math import ceil
from statistics import fmean

from ...engine.errors import printable
from ...engine.run.clock import PARTS
from .costs import Rank, Usage

LEAST = 60.0  # seconds of training before advice is given
ENOUGH = 600.0  # seconds of training before requests for the next job are given
MARGIN = 1.25  # what the next job asks for, divided by what this one needed
NAMES = {"data": "waiting for data"}  # names of parts in the log
SPEEDS = {"tflops_per_second": "{:.3g} TFLOP/s of a rank", "mfu_percent": "{:.0f}% MFU"}


def lines(usage: Usage, finished: bool) -> list[str]:
    """Return log lines with the cost, the time, the speed and the machines of a run, and advice.

    Args:
        usage: of the run.
        finished: whether the run has finished. Otherwise, it has not shown all that it needs.
    """
    wall, many = timedelta(seconds=round(usage.wall_seconds)), usage.attempts
    cost = [f"{usage.gpu_hours:.3g} GPU-hours (GPUs: {usage.gpus})"] if usage.gpus else []
    cost += [f"{usage.cpu_hours:.3g} CPU-hours (cores: {usage.cpus})"]
    cost += [f"{usage.gpu_kwh:.3g} kWh by the GPUs"] if usage.gpu_kwh else []
    parts, less = _parts(usage), _less(usage) if finished else {}
    requests = " ".join(f"--{name}={value}" for name, value in less.items())
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
        *([f"advice: {advice}"] if (advice := _advice(usage, parts, less)) else []),
        *([f"next time: sbatch {requests} ..."] if less else []),
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


def _less(usage: Usage) -> dict[str, str]:
    """Return the options of sbatch by which the next job can ask for less than this job did."""
    ranks, found = usage.ranks, dict[str, str]()
    training = usage.seconds["steps"] + usage.seconds["data"]
    if not usage.job or not ranks or training < ENOUGH:
        return {}
    # If Slurm gave the job many more cores than its ranks use, it gives whole nodes.
    options = usage.options if usage.cpus <= 2 * sum(each.cpus for each in ranks) else []
    # Samples of a node miss short peaks. The ranks know theirs, but count what they share twice.
    on_node = dict.fromkeys((each.host for each in ranks), 0.0)
    for each in ranks:
        on_node[each.host] += each.gib
    used = max(*on_node.values(), *(each.node_gib for each in ranks))
    memory, limit = max(ceil(MARGIN * used), 1), min(each.node_limit_gib for each in ranks)
    if "mem" in options and memory < limit:
        found["mem"] = f"{memory}G"
    # Slurm may send its signal a minute early.
    seconds = MARGIN * usage.wall_seconds + usage.lead_seconds + 60
    minutes = 10 * ceil(seconds / 600)
    if 60 * minutes < usage.limit_seconds:
        found["time"] = f"{minutes // 60:02}:{minutes % 60:02}:00"
    busy = max(each.cpu_seconds / each.seconds for each in ranks)
    cores = max(ceil(MARGIN * min(busy, usage.task_cpus)), usage.workers + 1)
    cores *= usage.task_cpus // max(ranks[0].cpus, 1)  # with torchrun, a task has several ranks
    if limit and "mem" not in found:  # the cores may bring the memory
        cores = max(cores, ceil(usage.task_cpus * min(memory / limit, 1)))
    if "cpus-per-task" in options and cores < usage.task_cpus:
        found["cpus-per-task"] = str(cores)
    return found


def _advice(usage: Usage, parts: Mapping[str, float], less: Collection[str]) -> str:
    """Return advice on what to change, or "" if there is none or the training was too short.

    The options `less` are named elsewhere.
    """
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
        (
            asked and cores < cpus / 2 and "cpus-per-task" not in less,
            f"{cores:.1f} of {cpus} cores of a rank used: ask for fewer",
        ),
        (
            asked and "mem" not in less and 0 < node.node_gib < node.node_limit_gib / 4,
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
