"""What runs cost together: a table of sums, and a row for each run for spreadsheets."""

import csv
import io
import math
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from ..engine.errors import UsageError, printable
from ..engine.filesystem import in_range
from ..engine.ranks import slurm_commands as slurm
from ..engine.run.usage import Usage, read
from .text import as_text, local_time

SKEW = 5  # seconds that the clock of a node may be behind that of Slurm
COLUMNS = ("attempts", "measured", "wall_hours", "GPU_hours", "CPU_hours", "node_kWh", "GPU_kWh")
# Where a spreadsheet begins a formula; for some of them, a semicolon begins a cell.
FORMULA = re.compile("(^|;)(?=\\s*[=+@\uff1d\uff0b\uff20\uff0d-])")


@dataclass
class Attempt:
    """What an attempt of a run cost, by column; what is not known is missing.

    It began in seconds since 1970. If it was not measured, that is the last update of its run.
    """

    run: Path
    user: str
    began: float
    costs: dict[str, float]


def attempts(runs: Mapping[Path, float]) -> list[Attempt]:
    """Return the attempts of runs, each of which was updated at a time in seconds since 1970."""
    found, by_job = list[Attempt](), defaultdict(list)
    for run, updated in runs.items():
        try:
            user = run.owner()
        except (KeyError, NotImplementedError):  # without a name; on Windows
            user = str(run.stat().st_uid)
        names, measured = (path.stem for path in run.glob("attempts/*.json")), read(run)
        numbers = measured.keys() | {int(name) for name in names if name.isdecimal()}
        for number in sorted(numbers) or [1]:
            usage = measured.get(number, Usage(updated, job=None))
            costs: dict[str, float] = {"attempts": 1, "measured": number in measured}
            if number in measured:
                costs["wall_hours"] = usage.wall_seconds / 3600
                costs |= {"GPU_hours": usage.gpu_hours, "CPU_hours": usage.cpu_hours}
                costs |= {"GPU_kWh": usage.gpu_kwh} if usage.gpu_kwh else {}
            found.append(Attempt(run, user, usage.began, costs))
            if usage.job and re.fullmatch("[0-9]{1,12}", usage.job):
                by_job[usage.job].append(found[-1])
    if shutil.which("sacct"):
        try:
            for first in range(0, len(by_job), 1000):  # a command has a longest line
                _add_energy(dict(islice(by_job.items(), first, first + 1000)))
        except UsageError as error:
            print(f"sacct can't be asked: {printable(str(error))}", file=sys.stderr)
    return found


def _add_energy(by_job: Mapping[str, Sequence[Attempt]]) -> None:
    """Divide the energy of the nodes in each start of a job among its attempts, by their time.

    Slurm counts joules in steps, and notes with the job what it knows when that ends: they are
    never added up. A training's steps miss the time between them, `batch` has the first node alone,
    and `extern` has all of it, where a site has that step. So the largest is nearest to the truth.
    """
    all_starts = ("--allusers", "--duplicates", f"--jobs={','.join(by_job)}")
    form = ("--noheader", "--parsable2", "--format=JobIDRaw,Start,End,ConsumedEnergyRaw")
    starts: list[tuple[list[Attempt], dict[str, float]]] = []
    for line in slurm.ask("sacct", *all_starts, *form, SLURM_TIME_FORMAT="%s").splitlines():
        name, *values = line.split("|")
        job, _, step = name.partition(".")
        # Words stand for what is not known yet, and 2**64 - 2 for what never will be.
        begin, end, joules = (float(x) if re.fullmatch(r"\d{1,15}", x) else 0.0 for x in values)
        if not step:  # a start, whose steps follow
            first, last = (begin or math.inf) - SKEW, end or math.inf
            here = [each for each in by_job.get(job, ()) if first <= each.began < last]
            starts.append((here, defaultdict(float)))
        starts[-1][1]["steps" if step.isdecimal() else step] += joules
    for here, of in starts:
        whole = sum(each.costs["wall_hours"] for each in here) or 1
        for each in here:
            if kwh := max(of.values()) / 3.6e6 * each.costs["wall_hours"] / whole:
                each.costs["node_kWh"] = kwh


def table(found: Sequence[Attempt]) -> list[Sequence[str]]:
    """Return the sums for each experiment, week and user, below a header and above the totals.

    The last row has the number of attempts whose costs are known, and are in the sums.
    """
    groups = defaultdict(list)
    for each in found:
        week, experiment = local_time(each.began, "%G-W%V"), each.run.resolve().parent.name
        groups[experiment, week, each.user].append(each)
    names = list(_sums(found))
    rows = [("experiment", "week", "user", *(name.replace("_", " ") for name in names))]
    for key, group in [*sorted(groups.items()), (("total", "", ""), found)]:
        sums = _sums(group)
        cells = [sums.get(name, "") for name in names]
        texts = (f"{x:,.{4 if 0 < x < 1 else 2}f}" if isinstance(x, float) else x for x in cells)
        rows.append((*key, *map(str, texts)))
    known = [sum(name in each.costs for each in found) for name in names]
    return [*rows, ("of attempts", "", "", *(str(count or "") for count in known))]


def as_csv(
    found: Sequence[Attempt], facts: Sequence[dict[str, Any]], settings: Sequence[dict[str, Any]]
) -> str:
    """Return a row for each run as CSV, in which no cell is a formula.

    Args:
        found: attempts of the runs, in the order of the runs.
        facts, settings: of each run, as `runs --json` has them, and by name.
    """
    rows = []
    of_runs = groupby(found, lambda each: each.run)
    for fact, given, (run, group) in zip(facts, settings, of_runs, strict=True):
        mine = list(group)
        row = {"folder": run, "user": mine[0].user, **fact, **_sums(mine)}
        row |= {name: local_time(row[name]) for name in ("started", "updated") if name in row}
        row["command"] = f"train {row.pop('flags')}"  # alone, flags would begin like a formula
        row |= {f"settings.{name}": value for name, value in given.items()}
        rows.append({_harmless(name): _harmless(value) for name, value in row.items()})
    text = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _sums(found: Sequence[Attempt]) -> dict[str, float]:
    """Return what attempts cost together, by column; what is not known of any is missing."""
    known = {name: [x.costs[name] for x in found if name in x.costs] for name in COLUMNS}
    sums = {name: round(sum(values), 6) for name, values in known.items() if values}
    return {"runs": len({each.run for each in found}), **sums}


def _harmless(value: object) -> Any:  # noqa: ANN401 - of any type
    """Return a number as it is, and what else there is as text that is no formula."""
    if value is None or (isinstance(value, int | float) and in_range(value)):
        return value
    return FORMULA.sub(r"\1'", printable(as_text(value)))
