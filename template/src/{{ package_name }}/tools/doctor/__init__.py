"""Checks what a job needs, before it waits in the queue or spends GPU hours.

These modules import packages inside functions, because a broken environment is one of the things to
find.
"""

import argparse
import dataclasses
import faulthandler
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine.errors import UsageError, say
from ...engine.filesystem import full_path
from .. import program
from . import nodes, scripts, software
from .findings import Finding, attempt, describe

if TYPE_CHECKING:
    from ...settings import Settings


def main(argv: Sequence[str]) -> int:
    """Print the findings, one on a line; return 1 if there is an error, else 0.

    With `--nodes=report`, print them as a line of JSON and return 0. With bad flags, the process
    ends with exit code 2.

    Raises:
        UsageError: the file for the results can't be written.
    """
    flags, others = _parser().parse_known_args(argv)
    # A package that was built for another CPU kills the process. This shows which import does it.
    faulthandler.enable()
    settings, bad_settings = _settings(others)
    jobs = scripts.read(Path("slurm"))
    here = chain(bad_settings, nodes.check(settings, jobs))
    if flags.nodes == "report":
        print(nodes.report(settings, here), flush=True)
        return 0
    if flags.nodes == "compare":
        of_nodes = attempt("nodes", nodes.compare, sys.stdin, settings)
    elif nodes.count() > 1:
        message = "only this node is checked: 'sbatch slurm/doctor.sbatch' checks the others too"
        of_nodes = chain([Finding("warning", "nodes", message)], here)
    else:
        of_nodes = here
    found = []
    for finding in chain(of_nodes, _check_project(settings, jobs)):
        say(finding)
        found.append(finding)
    errors, warnings = (sum(f.status == s for f in found) for s in ("error", "warning"))
    say(f"\n{errors} error(s), {warnings} warning(s)")
    if flags.json:
        findings = [dataclasses.asdict(finding) for finding in found]
        report = {"errors": errors, "warnings": warnings, "findings": findings}
        try:
            flags.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"can't write {flags.json}: {error.strerror}") from None
    return 1 if errors else 0


def _check_project(
    settings: "Settings | None", jobs: Sequence[scripts.Script]
) -> Iterator[Finding]:
    """Check what is the same for all nodes."""
    yield from attempt("git", software.repository)
    yield from attempt("scripts", scripts.check, jobs)
    yield from attempt("Slurm", scripts.check_submission, jobs)
    if settings:
        yield from attempt("trackers", _check_trackers, settings)


def _check_trackers(settings: "Settings") -> Iterator[Finding]:
    """Import the trackers that the settings name."""
    from ...trackers import load, select

    for name in select(settings.trackers):
        try:
            load(name)
        except Exception as error:
            yield Finding("error", name, describe(error))
        else:
            message = f"can be imported; '{program('check-trackers')}' logs a run to it"
            yield Finding("ok", name, message)
    dotenv = Path(".env")
    if dotenv.exists() and dotenv.stat().st_mode & 0o077:
        yield Finding("warning", ".env", "others can read the keys in .env: chmod 600 .env")


def _settings(argv: Sequence[str]) -> tuple["Settings | None", list[Finding]]:
    """Return the settings of a run, or None and the reason as a finding."""
    try:
        from ...settings import Settings

        return Settings.parse(argv, prog="doctor"), []
    except Exception as error:
        message = f"{describe(error)} (so the dataset and the trackers are not checked)"
        return None, [Finding("error", "settings", message)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("doctor"),
        description="Check what a job needs: software, scripts, Slurm, nodes, data, trackers.",
        epilog="The flags of train, such as --config, --data-dir or --run-root, are taken too.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json",
        type=lambda path: Path(full_path("--json", path)),
        metavar="FILE",
        help="file for the results",
    )
    parser.add_argument(
        "--nodes",
        choices=("report", "compare"),
        help="for slurm/doctor.sbatch: check only this node and print a line of JSON, or read such "
        "lines from standard input and compare them",
    )
    return parser
