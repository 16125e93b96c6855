"""What Slurm says to the batch scripts: its own verdict, and the facts that explain it."""

import getpass
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...core.errors import UsageError
from ...core.ranks.slurm import ask, run
from .findings import Finding, attempt
from .scripts import Script
from .software import in_image

# What srun would read as options, and slurm/common.sh removes.
REQUESTS = re.compile(
    r"SLURM_(MEM_PER_\w+|GPUS(_PER_\w+)?|CPUS_PER_GPU|TRES_PER_TASK|NTASKS_PER_(CORE|GPU|SOCKET))"
)
OUT_OF_SERVICE = re.compile(r"down|drain|fail|error|inval|unk")


@dataclass
class Partition:
    """A partition, as sinfo shows it.

    Args:
        available: up, or down, drain, inactive; limit: the longest time of a job, in seconds.
        states: of its nodes; gpus: of each of its nodes, how many there are by type.
    """

    available: str
    limit: float
    default: bool
    states: list[str] = field(default_factory=list)
    gpus: list[dict[str, int]] = field(default_factory=list)


def check(jobs: Sequence[Script]) -> Iterator[Finding]:
    """Ask Slurm about each script."""
    if not shutil.which("sinfo"):
        message = "its commands are not here, so what the batch scripts ask for is not checked"
        if in_image():
            message = "its commands are not in the image: run doctor outside it to ask them"
        yield Finding("ok", "Slurm", message)
        return
    controller = run("scontrol", "ping")
    if not re.search(r"\bUP\b", controller.stdout):
        lines = f"{controller.stdout}\n{controller.stderr}".split("\n")
        lines = [line for line in lines if line.strip("* ")]
        said = "; ".join([line for line in lines if line.startswith("Slurmctld")] or lines[-1:])
        raise UsageError(f"its controller does not answer, so no job can be submitted: {said}")
    partitions = _partitions()
    yield Finding("ok", "Slurm", f"partitions {', '.join(partitions)}")
    if asked := sorted(filter(REQUESTS.fullmatch, os.environ)):
        message = f"jobs that are submitted in it do not inherit its {', '.join(asked)}"
        yield Finding("ok", "this job", message)
    for job in jobs:
        # A compute node may not be allowed to submit, and this job was.
        if "SLURM_JOB_ID" not in os.environ:
            yield from attempt("Slurm", _verdict, job)
        yield from attempt("Slurm", _facts, job, partitions)
    yield from attempt("account", _accounts, jobs)


def _verdict(job: Script) -> Iterator[Finding]:
    """Submit a script without submitting it."""
    answer = run("sbatch", "--test-only", str(job.path))
    # Good or bad, the verdict is on stderr.
    if answer.returncode:
        said = (answer.stderr.strip() or "without a word").splitlines()[-1]
        yield Finding("error", "Slurm", f"refuses {job.path}: {said}")
        return
    when = re.search(r"to start at (\S+) .* on nodes (\S+)", answer.stderr)
    start = f", which would start at {when[1]} on {when[2]}" if when else ""
    yield Finding("ok", "Slurm", f"accepts {job.path}{start}")


def _partitions() -> dict[str, Partition]:
    """Return the partitions by name; sinfo writes a line for each node of each."""
    partitions: dict[str, Partition] = {}
    listing = ask("sinfo", "--noheader", "--all", "--Node", "--format=%P|%a|%l|%T|%G")
    for line in listing.splitlines():
        if line.count("|") != 4:
            continue
        name, available, limit, state, gres = line.split("|")
        found = Partition(available, seconds(limit), name.endswith("*"))
        partition = partitions.setdefault(name.removesuffix("*"), found)
        gpus: dict[str, int] = {}
        for kind, count in re.findall(r"\bgpu(?::([^:(,]+))?:(\d+)", gres):
            gpus[kind] = gpus.get(kind, 0) + int(count)
        partition.states.append(state)
        partition.gpus.append(gpus)
    return dict(sorted(partitions.items()))


def seconds(text: str) -> float:
    """Return a time as sbatch takes and sinfo shows it: minutes, h:m:s, d-h, infinite and so on.

    Raises:
        ValueError: it is none.
    """
    if text.lower() in ("infinite", "unlimited", "n/a"):
        return float("inf")
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:  # from hours on
        parts += [0] * (3 - len(parts))
    elif len(parts) == 1:  # minutes
        parts += [0]
    hours, minutes, left = [0] * (3 - len(parts)) + parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + left


def _facts(job: Script, partitions: dict[str, Partition]) -> Iterator[Finding]:
    """Name what a script asks for and no partition that it names has."""
    asked = job.options.partition.split(",") if job.options.partition else []
    names = asked or [name for name, partition in partitions.items() if partition.default]
    if not names:
        message = f"{job.path} names no partition, and there is no default: {_choice(partitions)}"
        yield Finding("error", "partition", message)
        return
    misfits = [list(_misfits(job, name, partitions)) for name in names]
    # A job with several partitions starts in whichever can.
    if all(misfits):
        yield from misfits[0]
        return
    for name in names:
        states = partitions[name].states if name in partitions else []
        if states and all(OUT_OF_SERVICE.match(state) for state in states):
            message = f"no node of {name} is in service now: {job.path} would wait"
            yield Finding("warning", "partition", message)


def _misfits(job: Script, name: str, partitions: dict[str, Partition]) -> Iterator[Finding]:
    """Yield what a script asks for and a partition does not have."""
    partition = partitions.get(name)
    cure = f"change the #SBATCH lines of {job.path}"
    if not partition:
        message = f"there is no '{name}', which {job.path} names: {_choice(partitions)}"
        yield Finding("error", "partition", message)
        return
    if partition.available != "up":
        message = f"{name} is {partition.available}: wait, or {cure}"
        yield Finding("error", "partition", message)
    if job.options.time and seconds(job.options.time) > partition.limit:
        hours = f"{partition.limit / 3600:g} hours"
        message = f"{job.options.time} is more than the {hours} that {name} allows: {cure}"
        yield Finding("error", "time limit", message)
    asked = re.match(r"\d+", job.options.nodes)
    count = int(asked[0]) if asked else 1
    if count > len(partition.states):
        message = f"{count} are more than the {len(partition.states)} of {name}: {cure}"
        yield Finding("error", "nodes", message)
    elif job.gpus:
        kind, wanted = job.gpus
        enough = [
            gpus
            for gpus in partition.gpus
            if (gpus.get(kind, 0) if kind else sum(gpus.values())) >= wanted
        ]
        if len(enough) < count:
            kinds = sorted(
                {f"{t or 'gpu'}:{n}" for gpus in partition.gpus for t, n in gpus.items()}
            )
            message = (
                f"{wanted} {f'of type {kind} ' if kind else ''}a node on {count} node(s) are more "
                f"than {name} has (its nodes have {', '.join(sorted(kinds)) or 'none'}): {cure}"
            )
            yield Finding("error", "GPUs", message)


def _choice(partitions: dict[str, Partition]) -> str:
    return f"choose of {', '.join(partitions)} with #SBATCH --partition"


def _accounts(jobs: Sequence[Script]) -> Iterator[Finding]:
    """Compare accounts and qualities of service with those that the user has.

    Not having one is a warning: many sites keep such a list without minding it, and where they
    do mind, Slurm has refused the script.
    """
    if not any(job.options.account or job.options.qos for job in jobs):
        return
    user = getpass.getuser()
    query = ("show", "associations", f"user={user}", "format=account,qos")
    try:
        lines = ask("sacctmgr", "--noheader", "--parsable2", *query).splitlines()
    except UsageError as error:
        yield Finding("ok", "account", f"can't be checked here: {error}")
        return
    rows = [line.split("|") for line in lines if line.count("|") == 1]
    accounts = {account for account, _ in rows}
    for job in jobs:
        account = job.options.account
        services = {
            service
            for own, listed in rows
            if account in ("", own)
            for service in listed.split(",")
            if service
        }
        if account and account not in accounts:
            message = f"'{account}' of {job.path} is not among yours: {', '.join(sorted(accounts))}"
            yield Finding("warning", "account", message)
        elif job.options.qos and job.options.qos not in services:
            message = f"'{job.options.qos}' of {job.path} is not among yours: "
            yield Finding("warning", "QOS", message + ", ".join(sorted(services)))
        elif account:
            yield Finding("ok", "account", f"{account} of {job.path} is yours")
