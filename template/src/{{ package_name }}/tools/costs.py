"""Adds up the costs of runs: `python -m <package> costs [FOLDER...] [--csv FILE]`.

It prints a table of sums, and writes a CSV file for spreadsheets with a row for each run.
"""

import csv
import dataclasses
import io
import math
import re
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import tyro

from ..engine.config import read_flags
from ..engine.errors import UsageError, printable
from ..engine.foreign import in_range
from ..engine.ranks import slurm_commands as slurm
from ..plugins.usage.costs import Usage, read
from . import program
from .survey import Run, read_settings, recent, results
from .text import aligned, as_text, local_time, write

SKEW = 5  # seconds that a node's clock may be behind the clock of Slurm's controller
COLUMNS = ("attempts", "measured", "wall_hours", "GPU_hours", "CPU_hours", "node_kWh", "GPU_kWh")
# Places where a spreadsheet would begin a formula. In some of them, a semicolon begins a cell.
FORMULA = re.compile("(^|;)(?=\\s*[=+@\uff1d\uff0b\uff20\uff0d-])")


@dataclasses.dataclass(frozen=True)
class Flags:
    """Add up what runs cost, for each experiment, week and user."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """folders of runs, of experiments or of all experiments; default: run_root of the settings"""
    hours: float = math.inf
    """only runs that wrote something in the last HOURS hours"""
    csv: Path | None = None
    """CSV file to write with a row for each run: status, costs, settings"""


def main(argv: Sequence[str]) -> int:
    """Print the sums; return 0.

    Raises:
        UsageError: a folder does not exist, or the file can't be written.
    """
    flags = read_flags(Flags, argv, program("costs"))
    folders, runs = recent(flags.folders, flags.hours, time.time())
    found = attempts({run.folder: run.state["updated"] for run in runs})
    lines = aligned(table(found)) if runs else [f"no runs in {', '.join(map(str, folders))}"]
    print("\n".join(lines))
    if flags.csv:
        write(flags.csv, as_csv(found, runs))
    return 0


@dataclasses.dataclass
class Attempt:
    """The costs of an attempt of a run.

    Attributes:
        run: the run folder.
        user: owner of the run folder.
        began: start of the attempt, in seconds since 1970; if that was not measured, the last
            update of the run.
        costs: costs by column. Columns whose value is unknown are missing.
    """

    run: Path
    user: str
    began: float
    costs: dict[str, float]


def attempts(runs: Mapping[Path, float]) -> list[Attempt]:
    """Return the attempts of runs.

    Args:
        runs: run folders, and when each was last updated, in seconds since 1970.
    """
    found, by_job = list[Attempt](), defaultdict(list)
    for run, updated in runs.items():
        try:
            user = run.owner()
        except (KeyError, NotImplementedError):  # the user has no name; or this is Windows
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
            for first in range(0, len(by_job), 1000):  # the length of a command is limited
                _add_energy(dict(islice(by_job.items(), first, first + 1000)))
        except UsageError as error:
            print(f"sacct does not answer: {printable(str(error))}", file=sys.stderr)
    return found


def _add_energy(by_job: Mapping[str, Sequence[Attempt]]) -> None:
    """Divide the nodes' energy in each start of a job among the job's attempts, by their duration.

    Slurm counts the energy of each job step in joules, but does not add the steps up for the job.
    The sum of the numbered steps misses the time between them, the step `batch` has only the first
    node, and the step `extern` has everything, but only some sites have this step. So the largest
    of these numbers is nearest to the truth.
    """
    all_starts = ("--allusers", "--duplicates", f"--jobs={','.join(by_job)}")
    form = ("--noheader", "--parsable2", "--format=JobIDRaw,Start,End,ConsumedEnergyRaw")
    starts: list[tuple[list[Attempt], dict[str, float]]] = []
    for line in slurm.ask("sacct", *all_starts, *form, SLURM_TIME_FORMAT="%s").splitlines():
        name, *values = line.split("|")
        job, _, step = name.partition(".")
        # A word instead of a number: not known yet. The number 2**64 - 2: will never be known.
        begin, end, joules = (float(x) if re.fullmatch(r"\d{1,15}", x) else 0.0 for x in values)
        if not step:  # this line is a start of the job; the lines of its steps follow
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
    """Return a table: a header, the sums for each experiment, week and user, and the totals.

    The last row has, for each column, the number of attempts whose costs are known.
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


def as_csv(found: Sequence[Attempt], runs: Sequence[Run]) -> str:
    """Return CSV with a row for each run. No cell is a formula.

    Args:
        found: attempts of the runs, in the order of the runs.
        runs: the runs.
    """
    rows = []
    for run, (_, group) in zip(runs, groupby(found, lambda each: each.run), strict=True):
        mine, facts, given = list(group), run.facts, read_settings(run.folder)
        row = {"folder": facts["folder"], "user": mine[0].user, **facts}
        row |= results(run.folder) | _sums(mine)
        row |= {name: local_time(row[name]) for name in ("started", "updated") if name in row}
        row["command"] = f"train {row.pop('flags')}"  # flags alone would look like a formula
        row |= {f"settings.{name}": value for name, value in given.items()}
        rows.append({_harmless(name): _harmless(value) for name, value in row.items()})
    text = io.StringIO()
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _sums(found: Sequence[Attempt]) -> dict[str, float]:
    """Return the sums of costs by column, without columns that are unknown for all attempts."""
    known = {name: [x.costs[name] for x in found if name in x.costs] for name in COLUMNS}
    sums = {name: round(sum(values), 6) for name, values in known.items() if values}
    return {"runs": len({each.run for each in found}), **sums}


def _harmless(value: object) -> Any:  # noqa: ANN401 - of any type
    """Return a number unchanged, and any other value as text that is not a formula."""
    if value is None or (isinstance(value, int | float) and in_range(value)):
        return value
    return FORMULA.sub(r"\1'", printable(as_text(value)))
