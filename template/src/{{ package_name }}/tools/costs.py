"""What runs cost together: a table of sums, and a row for each run for spreadsheets."""

import csv
import io
import math
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..engine.errors import UsageError, printable
from ..engine.filesystem import in_range
from ..engine.ranks import slurm_commands as slurm
from ..engine.run.usage import Usage, read
from .text import local_time

SKEW = 5  # seconds that the clock of a node may be behind that of Slurm
RARE = ("unmeasured", "node_kWh", "GPU_kWh")  # columns that a table without such values lacks
# Where a spreadsheet begins a formula; for some of them, a semicolon begins a cell.
FORMULA = re.compile("(^|;)(?=\\s*[=+@\uff1d\uff0b\uff20\uff0d-])")


@dataclass
class Attempt:
    """What an attempt of a run cost; of one that is not measured, only the time is known.

    Args:
        node_kwh: what its nodes drew, as Slurm measured it; 0 if that is not known.
    """

    run: Path
    user: str
    usage: Usage
    measured: bool
    node_kwh: float = 0.0

    @property
    def experiment(self) -> str:
        """The folder that the run is in."""
        return self.run.resolve().parent.name


def attempts(runs: Mapping[Path, float]) -> list[Attempt]:
    """Return the attempts of runs, each of which was updated at a time in seconds since 1970."""
    found = [each for run, updated in runs.items() for each in _of_run(run, updated)]
    by_job = defaultdict(list)
    for each in found:
        if (job := each.usage.job) and re.fullmatch("[0-9]+", job):
            by_job[job].append(each)
    if by_job and shutil.which("sacct"):
        try:
            _add_energy(by_job)
        except UsageError as error:
            print(f"sacct can't be asked: {printable(str(error))}", file=sys.stderr)
    return found


def _of_run(run: Path, updated: float) -> Iterator[Attempt]:
    """Yield the attempts of a run; a single one, not measured, if it has no files of them."""
    try:
        user = run.owner()
    except (KeyError, NotImplementedError):  # without a name; on Windows
        user = str(run.stat().st_uid)
    known = read(run)
    times = dict.fromkeys(known, updated)
    for path in (run / "attempts").glob("*.json"):
        with suppress(OSError, ValueError):  # it is no attempt, or was removed
            times.setdefault(int(path.stem), path.stat().st_mtime)
    for number, ended in sorted(times.items()) or [(1, updated)]:
        yield Attempt(run, user, known.get(number, Usage(ended, job=None)), number in known)


def _add_energy(by_job: Mapping[str, Sequence[Attempt]]) -> None:
    """Divide the energy of the nodes in each start of a job among its attempts, by their time.

    Slurm counts joules in steps, and notes with the job what it knows when that ends: they are
    never added up. A training's steps miss the time between them, `batch` has the first node alone,
    and `extern` has all of it, where a site has that step. So the largest is nearest to the truth.

    Raises:
        UsageError: sacct does not answer, or fails.
    """
    all_starts = ("--allusers", "--duplicates", f"--jobs={','.join(by_job)}")
    form = ("--noheader", "--parsable2", "--format=JobIDRaw,Start,End,ConsumedEnergyRaw")
    starts: list[tuple[str, float, float, dict[str, float]]] = []
    for line in slurm.ask("sacct", *all_starts, *form, SLURM_TIME_FORMAT="%s").splitlines():
        name, *values = line.split("|")
        job, _, step = name.partition(".")
        # Words stand for what is not known yet, and 2**64 - 2 for what never will be.
        begin, end, joules = (float(x) if re.fullmatch(r"\d{1,15}", x) else 0.0 for x in values)
        if not step:  # its steps follow
            starts.append((job, begin or math.inf, end or math.inf, defaultdict(float)))
        starts[-1][3]["steps" if step.isdecimal() else step] += joules
    for job, begin, end, of in starts:
        here = [x for x in by_job.get(job, ()) if begin - SKEW <= x.usage.began < end]
        whole = sum(each.usage.wall_seconds for each in here) or 1
        for each in here:
            each.node_kwh = max(of.values()) / 3.6e6 * each.usage.wall_seconds / whole


def table(found: Sequence[Attempt]) -> list[Sequence[str]]:
    """Return the sums for each experiment, week and user, below a header and above the totals."""
    groups = defaultdict(list)
    for each in found:
        week = local_time(each.usage.began, "%G-W%V")
        groups[each.experiment, week, each.user].append(each)
    names = [name for name, value in _sums(found).items() if value or name not in RARE]
    rows: list[Sequence[str]] = [
        ("experiment", "week", "user", *(name.replace("_", " ") for name in names))
    ]
    for key, group in [*sorted(groups.items()), (("total", "", ""), found)]:
        sums = _sums(group)
        rows.append((*key, *(_text(sums[name]) for name in names)))
    return rows


def notes(found: Sequence[Attempt], closed: Sequence[Path]) -> list[str]:
    """Return what to know of the numbers in the table; `closed` are folders without access."""
    unmeasured = sum(not each.measured for each in found)
    nodes = sum(each.node_kwh > 0 for each in found)
    gpus = sum(each.usage.gpu_kwh > 0 for each in found)
    lines = {
        f"unmeasured: {unmeasured} of {len(found)} attempts, whose hours are not in the sums: they "
        "are of an earlier version, or ended as they began": unmeasured,
        f"node kWh: of nodes in {nodes} of {len(found)} attempts, as Slurm measured it": nodes,
        f"GPU kWh: of GPUs in {gpus} of {len(found)} attempts, as the ranks measured it": gpus,
        f"left out: {len(closed)} folders that can't be read": closed,
    }
    return [line for line, holds in lines.items() if holds]


def as_csv(
    found: Sequence[Attempt], facts: Sequence[dict[str, Any]], settings: Sequence[dict[str, Any]]
) -> str:
    """Return a row for each run as CSV, in which no cell is a formula.

    Args:
        facts, settings: of each run, as `runs --json` has them, and by name.
    """
    of_run, rows = defaultdict(list), []
    for each in found:
        of_run[str(each.run)].append(each)
    for fact, given in zip(facts, settings, strict=True):
        mine = of_run[fact["folder"]]
        times = {"started": min(each.usage.began for each in mine), "updated": fact["updated"]}
        first = {"folder": "", "experiment": mine[0].experiment, "user": mine[0].user}
        row = {**first, **fact, **_sums(mine), "command": f"train {fact['flags']}"}
        row |= {name: local_time(each, "%Y-%m-%d %H:%M:%S") for name, each in times.items()}
        row |= {f"settings.{name}": value for name, value in given.items()}
        row.pop("flags")  # as a cell of its own, it would begin like a formula
        rows.append({_harmless(name): _harmless(value) for name, value in row.items()})
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _sums(found: Sequence[Attempt]) -> dict[str, float | None]:
    """Return what attempts cost together, by the name of the column; None for what is unknown."""
    known = [each.usage for each in found if each.measured]

    def add(values: Sequence[float]) -> float | None:
        return round(sum(values), 6) if values else None

    return {
        "runs": len({each.run for each in found}),
        "attempts": len(found),
        "unmeasured": len(found) - len(known),
        "wall_hours": add([each.wall_seconds / 3600 for each in known]),
        "GPU_hours": add([each.gpu_hours for each in known]),
        "CPU_hours": add([each.cpu_hours for each in known]),
        "node_kWh": add([each.node_kwh for each in found if each.node_kwh]),
        "GPU_kWh": add([each.gpu_kwh for each in known if each.gpu_kwh]),
    }


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"


def _harmless(value: object) -> Any:  # noqa: ANN401 - of any type
    """Return a number as it is, and what else there is as text that is no formula."""
    if value is None or (isinstance(value, int | float) and in_range(value)):
        return value
    with suppress(ValueError):  # an integer of thousands of digits
        return FORMULA.sub(r"\1'", printable(str(value)))
    return "?"
