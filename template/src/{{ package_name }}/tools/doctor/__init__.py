"""Checks what a job needs, before it waits in the queue or spends GPU hours.

The modules of this folder import packages inside functions, so that they also run in a broken
environment, and can report it.
"""

import argparse
import faulthandler
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine.errors import say
from .. import program
from . import nodes, scripts
from .findings import Finding, attempt, describe

if TYPE_CHECKING:
    from ...settings import Settings


def main(argv: Sequence[str]) -> int:
    """Print the findings, one on a line; return 1 if there is an error, else 0.

    With `--nodes=report`, print them as a line of JSON and return 0. With bad flags, the process
    ends with exit code 2.
    """
    parser = argparse.ArgumentParser(
        prog=program("doctor"),
        description="Check what a job needs: software, scripts, Slurm, nodes, data.",
        epilog="It also takes the flags of train, such as --config, --data-dir or --run-root.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nodes",
        choices=("report", "compare"),
        help="for slurm/doctor.sbatch: check only this node and print a line of JSON, or read such "
        "lines from standard input and compare them",
    )
    flags, others = parser.parse_known_args(argv)
    # A package that was built for another CPU kills the process at its import. This shows where.
    faulthandler.enable()
    settings, bad_settings = _settings(others)
    jobs = scripts.read(Path("slurm"))
    here = chain(bad_settings, nodes.check(settings, jobs))
    if flags.nodes == "report":
        print(nodes.report(settings, here), flush=True)
        return 0
    compared = attempt("nodes", nodes.compare, sys.stdin, settings)
    of_nodes = compared if flags.nodes == "compare" else here
    of_scripts = attempt(
        "scripts", scripts.check, jobs, Path(settings.run_root) if settings else None
    )
    of_trackers = attempt("trackers", _trackers, settings) if settings else ()
    counts: Counter[str] = Counter()
    for finding in chain(of_nodes, of_scripts, of_trackers):
        say(finding)
        counts[finding.status] += 1
    say(f"\n{counts['error']} error(s), {counts['warning']} warning(s)")
    return int(counts["error"] > 0)


def _settings(argv: Sequence[str]) -> tuple["Settings | None", list[Finding]]:
    """Return the settings of a run, or None and the reason as a finding."""
    try:
        from ...settings import Settings

        return Settings.parse(argv, prog="doctor"), []
    except Exception as error:
        message = f"{describe(error)} (so the dataset, run folder and trackers are not checked)"
        return None, [Finding("error", "settings", message)]


def _trackers(settings: "Settings") -> Iterator[Finding]:
    from ...trackers import load, select

    names = select(settings.trackers)
    if names:
        message = f"{', '.join(names)}: '{program('check-trackers')}' logs a run to each"
        yield Finding("ok", "trackers", message)
    for name in names:
        try:
            state = getattr(load(name), "STATE", "")
        except Exception as error:
            message = f"{name} can't be imported: {describe(error)}: run 'make setup'"
            yield Finding("error", "trackers", message)
        else:
            if state:
                yield Finding("warning", "trackers", state)
    dotenv = Path(".env")
    if dotenv.exists() and dotenv.stat().st_mode & 0o077:
        yield Finding("warning", ".env", "others can read the keys in .env: chmod 600 .env")
