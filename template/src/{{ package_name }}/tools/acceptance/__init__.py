"""Tests that the project works on a cluster: `python -m <package> acceptance`.

It submits the project's own scripts, one after the other, each with few nodes and steps.
"""

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...engine.config import read_yaml
from ...engine.errors import (
    SECRET,
    UsageError,
    printable,
    printable_lines,
    say,
    without_secrets,
)
from ...engine.foreign import read_object
from ...engine.ranks import slurm_commands as slurm
from ...settings import Settings
from .. import program
from ..text import duration
from .checks import Check, Checks
from .jobs import Failure, Interrupted, Job, Jobs
from .record import build

Results = list[dict[str, object]]
"""For each check its `name`, `result` and `seconds`."""


def main(argv: Sequence[str]) -> int:
    """Run the checks and print a row for each; return 0 if all pass, else 1.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP cancel the jobs of the checks. The exit code is then 128
    plus the number of the signal.

    Raises:
        UsageError: there is no Slurm, no script or no check of a given name; the jobs would go to
            another cluster; or the logs cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog=program("acceptance"),
        description="Submit small jobs, one after the other, and print what works on this cluster.",
        epilog="It also takes the flags of train, such as --dataset or --device. Environment "
        "variables of sbatch, such as SBATCH_RESERVATION, select where the jobs run.",
        allow_abbrev=False,
    )
    only, seconds = "run only these checks", "duration of the training that is stopped, in seconds"
    wait = "time limit of a job in minutes, including its time in the queue"
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help=only)
    parser.add_argument("--seconds", type=positive, default=60, help=f"{seconds} (%(default)s)")
    parser.add_argument("--wait", type=positive, default=60, help=f"{wait} (%(default)s)")
    flags, train = parser.parse_known_args(argv)
    settings = Settings.parse(train, "acceptance")
    if not shutil.which("sbatch"):
        raise UsageError("sbatch is missing: run this on a login node of a Slurm cluster")
    if clusters := os.environ.get("SBATCH_CLUSTERS") or os.environ.get("SLURM_CLUSTERS"):
        raise UsageError(
            f"can't follow jobs on {clusters}: unset SBATCH_CLUSTERS and SLURM_CLUSTERS"
        )
    name = f"acceptance-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    folder = Path(settings.run_root, name).absolute()
    jobs = Jobs(60 * flags.wait, f"logs/{name}-%j.out")
    known = list(Checks(settings, train, jobs, folder, flags.seconds))
    if not known:
        raise UsageError("there is no batch script in slurm/: run this in the project's root")
    checks = [each for each in known if each.name in (flags.only or [each.name])]
    if unknown := set(flags.only) - {each.name for each in known}:
        names = shlex.join(each.name for each in known)
        raise UsageError(f"--only {shlex.join(unknown)}: no such check: expected {names}")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, jobs.interrupt)
    report = Path("logs", f"{name}.txt")
    try:
        report.parent.mkdir(exist_ok=True)
        results = run(checks, jobs, report, argv)
        record = write_record({**here(), **on_nodes(folder)}, results)
    except Interrupted:
        cancelled = list(jobs.running)
        say(f"interrupted: cancelling {', '.join(job.id for job in cancelled) or 'no job'}")
        jobs.cancel()
        for job in cancelled:
            job.log.unlink(missing_ok=True)
        return 128 + jobs.signal
    except OSError as error:
        raise UsageError(f"can't write to {report.parent}: {error.strerror}") from None
    finally:
        jobs.cancel()
        shutil.rmtree(folder, ignore_errors=True)
        for job in jobs.all:
            forget(job)
    passed = sum(each["result"] == "pass" for each in results)
    say(f"\n{passed} of {len(checks)} checks passed")
    say(f"for help, send {report}; to report what works here, {record}, without names and paths")
    return int(passed < len(checks))


def run(checks: Sequence[Check], jobs: Jobs, report: Path, argv: Sequence[str]) -> Results:
    """Run the checks, print a row for each, and return the results.

    The rows are also written to a file. The logs of checks that pass are removed.
    """
    results, logs = Results(), list[str]()
    learn_secrets(Path("slurm/site.sh"))
    rows = [*describe(argv), "", row("check", "result", "time", "")]
    say("\n".join(rows))
    for check in checks:
        began, result, log, earlier = time.monotonic(), "FAIL", "", len(jobs.all)
        try:
            why, result = check.run(), "pass"
            for job in jobs.all[earlier:]:
                job.log.unlink(missing_ok=True)
        except (Failure, UsageError) as failure:
            jobs.check()
            why, log = str(failure), getattr(failure, "log", "")
            jobs.cancel()
        took = time.monotonic() - began
        results.append({"name": check.name, "result": result, "seconds": round(took)})
        rows.append(row(check.name, result, duration(took), why))
        say(rows[-1])
        logs += [f"\n== {check.name} ==\n{log}"] * bool(log)
        text = printable_lines(without_secrets("\n".join([*rows, *logs])))
        report.write_text(f"{text}\n", encoding="utf-8")
    return results


def learn_secrets(script: Path) -> None:
    """Tell `without_secrets` about the secrets that a script sets only in jobs."""
    with suppress(OSError):
        for name, value in re.findall(
            r"(\w+)=[\"']?([^\s\"';]+)", script.read_text("utf-8", "replace")
        ):
            if SECRET.search(name):
                os.environ.setdefault(name, value)


def row(name: str, result: str, seconds: str, why: str) -> str:
    """Return a row of the table."""
    return f"{name:20} {result:6} {seconds:>8}  {printable(why)}".rstrip()


def describe(argv: Sequence[str]) -> Iterator[str]:
    """Yield the lines above the table: versions, cluster, answers, flags."""
    yield f"{time.strftime('%H:%M')} on {socket.gethostname()}"
    yield from (f"{name}: {value}" for name, value in here().items())
    given = [f"{name}={value}" for name, value in os.environ.items() if name[:7] == "SBATCH_"]
    yield f"given: {shlex.join([*given, *argv]) or 'nothing'}"


def here() -> dict[str, Any]:
    """Return the date, the versions on this machine, and the answers that matter."""
    answers = read_yaml(Path(".copier-answers.yml"))
    names = ("launch_modes", "launcher", "gpu_request", "environment", "container")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "template": answers.get("_commit", "?"),
        "slurm": slurm.ask("sbatch", "--version").strip(),
        "python": platform.python_version(),
        "torch": version("torch"),
        **{name: answers[name] for name in names if name in answers},
    }


def on_nodes(runs: Path) -> dict[str, Any]:
    """Return what the runs in a folder say about their nodes; a later run overrides earlier ones.

    A record without these facts is better than none, so files that can't be read are left out.
    """
    found: dict[str, Any] = {}
    for path in sorted(runs.glob("*/provenance.json"), key=os.path.getmtime):
        with suppress(OSError, ValueError, KeyError, TypeError):
            made = read_object(path, {"gpu": dict, "hostnames": list, "world_size": int})
            found |= {"backend": made["backend"], **made["gpu"]}
            found |= {"python": made["python"]["version"], "torch": made["packages"]["torch"]}
            if made["gpu"]:  # each rank has one
                ranks = made["world_size"] // len(made["hostnames"])
                found |= {"gpu": made["gpu"]["name"], "gpus_per_node": ranks}
    return found


def write_record(facts: Mapping[str, object], results: Results) -> Path:
    """Write the record of this site to logs/, with the name of the cluster; return its path."""
    cluster = ""
    with suppress(UsageError):  # Slurm is busy
        config = slurm.run("scontrol", "show", "config").stdout
        cluster = "".join(re.findall(r"^ClusterName *= *(.*)$", config, re.MULTILINE))
    site = re.sub("[^a-z0-9]+", "-", cluster.lower())[:40].strip("-") or "cluster"
    path = Path("logs", f"acceptance-{site}-{facts['date']}.json")
    path.write_text(json.dumps(build(facts, results), indent=2) + "\n", encoding="utf-8")
    return path


def forget(job: Job) -> None:
    """Remove the files that a killed job leaves in logs/."""
    names = ("code-*-{}-*", "died-*-{}", "bad-nodes-*-{}", "failed-*-{}-*")
    for path in (path for name in names for path in Path("logs").glob(name.format(job.id))):
        path.unlink(missing_ok=True)


def positive(text: str) -> float:
    """Return a positive, finite number; raise ValueError if the text is not one."""
    if not 0 < float(text) < float("inf"):
        raise ValueError
    return float(text)
