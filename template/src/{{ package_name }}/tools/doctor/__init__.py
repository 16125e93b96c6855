"""Would a job run here? Asked before one waits in the queue, or before it spends GPU hours.

Only the standard library is imported up front: a broken environment is among what is found.
"""

import argparse
import dataclasses
import faulthandler
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import UsageError, say
from ...core.filesystem import full_path
from ...core.ranks.environment import Ranks
from .. import program
from . import cluster, node, nodes, scripts, software, trackers
from .findings import Finding, attempt, describe

if TYPE_CHECKING:
    from ...settings import Settings


def main(argv: Sequence[str]) -> int:
    """Print what was found, a line for each check; return 1 if there is an error, else 0.

    Of several processes, one on each node, the first speaks for all. Bad flags end the process
    with exit code 2.

    Raises:
        UsageError: the file for the results can't be written.
    """
    flags, others = _parser().parse_known_args(argv)
    # A package that was built for another CPU kills the process: at least say in which import.
    faulthandler.enable()
    try:
        ranks, misuse = Ranks.from_environment(os.environ), None
    except UsageError as error:
        ranks, misuse = Ranks("none", 0, 1, 0), str(error)
    if ranks.size == int(os.environ.get("SLURM_STEP_NUM_NODES", 0)):
        # The others look for the first process on the first node, where rank 0 need not be.
        ranks = dataclasses.replace(ranks, rank=int(os.environ["SLURM_NODEID"]))
    found = []
    if misuse:
        found.append(Finding("warning", "launcher", f"only this process is checked: {misuse}"))
        say(found[0])
    for finding in check(others, ranks, flags.timeout):
        say(finding)
        found.append(finding)
    if ranks.rank:
        return 0
    errors, warnings = (
        sum(finding.status == status for finding in found) for status in ("error", "warning")
    )
    say(f"\n{errors} error(s), {warnings} warning(s)")
    if flags.json:
        findings = [dataclasses.asdict(finding) for finding in found]
        report = {"errors": errors, "warnings": warnings, "findings": findings}
        try:
            flags.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"can't write {flags.json}: {error.strerror}") from None
    return 1 if errors else 0


def check(argv: Sequence[str], ranks: Ranks, timeout: float) -> Iterator[Finding]:
    """Yield all findings, on the first process; others only tell it theirs.

    Args:
        argv: flags of a run.
        timeout: seconds that the first process waits for the others.
    """
    settings, wrong_settings = _settings(argv)
    jobs, wrong_scripts = scripts.read(Path("slurm"))
    root = Path(settings.run_root if settings else ".")

    def on_each_node() -> Iterator[Finding]:
        yield from wrong_settings
        yield from attempt("python", software.python)
        yield from attempt("packages", software.packages)
        yield from attempt("torch", software.pytorch, settings, jobs)
        if settings:
            yield from attempt("dataset", node.dataset, settings)
        yield from attempt("space", node.space, root)
        yield from attempt("network", node.network, os.environ)

    databases: dict[str, str] = {}
    with suppress(UsageError):  # `trackers.check` says it
        databases = trackers.databases(settings) if settings else {}
    yield from nodes.compare(root, ranks, timeout, on_each_node, databases)
    if ranks.rank == 0:
        yield from attempt("git", software.repository)
        yield from wrong_scripts
        yield from attempt("scripts", scripts.check, jobs)
        yield from attempt("Slurm", cluster.check, jobs)
        if settings:
            yield from attempt("trackers", trackers.check, settings)


def _settings(argv: Sequence[str]) -> tuple["Settings | None", list[Finding]]:
    """Return the settings of a run, or None and why they can't be had."""
    try:
        from ...settings import Settings

        return Settings.parse(argv, prog="doctor"), []
    except Exception as error:
        message = f"{describe(error)} (so the dataset and the trackers are not checked)"
        return None, [Finding("error", "settings", message)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("doctor"),
        description="Check what a job needs: software, Slurm's answers, nodes, data, trackers.",
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
        "--timeout",
        type=float,
        default=60,
        metavar="SECONDS",
        help="how long the first node waits for the others (default: %(default)s)",
    )
    return parser
