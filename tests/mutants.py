"""Plants faults in copies of the repository, one in each, and shows which ones the tests notice.

`make mutants` plants all faults of mutants.yaml; `python tests/mutants.py --share 10` every tenth,
beginning with another one each day. A fault survives if the tests that should notice it pass.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
SOURCE = "template/src/{{ package_name }}/"
PASSED, FAILED = 0, 1  # exit codes of pytest
# What no test reads, or makes again; the environment of the site alone has 20,000 files.
NOT_COPIED = (".venv", ".git", ".docs", ".demo", ".*_cache", "__pycache__", "site", "results")
PATIENCE = 600  # seconds for the tests of one fault; a fault may make them hang


class Fault(NamedTuple):
    """A text of a file and what takes its place, with the arguments of pytest that should fail."""

    room: str
    file: Path
    old: str
    new: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        old, new = (text.strip().partition("\n")[0][:60] for text in (self.old, self.new))
        return f"{self.room:10} {self.file.name}: {old} -> {new}"

    def planted(self) -> str:
        """Return the file's text with the fault.

        Raises:
            ValueError: the old text is not in the file exactly once.
        """
        text = (ROOT / self.file).read_text("utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} has {text.count(self.old)} times: {self.old}")
        return text.replace(self.old, self.new)


def read() -> Iterator[Fault]:
    """Yield the faults of the table."""
    for group in yaml.safe_load(TABLE.read_text("utf-8")):
        tests = tuple(shlex.split(group["tests"]))
        for file, old, new in group["faults"]:
            path = Path(file.replace("src/", SOURCE, 1) if file.startswith("src/") else file)
            yield Fault(group["room"], path, old, new, tests)


def outcome(fault: Fault) -> str:
    """Return "killed", "survived" or what else happened to a fault."""
    with TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(*NOT_COPIED)
        shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
        (copy / ".venv").symlink_to(ROOT / ".venv")
        for words in (["init", "-q"], ["add", "--all"]):
            subprocess.run(["git", *words], cwd=copy, check=True)
        (copy / fault.file).write_text(fault.planted(), "utf-8")
        command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *fault.tests]
        try:
            done = subprocess.run(
                command,
                cwd=copy / "tests",
                env={**os.environ, "TMPDIR": folder},
                capture_output=True,
                text=True,
                timeout=PATIENCE,
            )
        except subprocess.TimeoutExpired:
            return "killed"  # the tests hang, which nobody overlooks
    known = {PASSED: "survived", FAILED: "killed"}
    return (
        known.get(done.returncode) or f"pytest ended with {done.returncode}: {done.stdout[-500:]}"
    )


def main() -> int:
    """Print what becomes of each fault; return 1 if one survives, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=int, default=1, help="plant only every SHAREth fault")
    parser.add_argument("--room", help="plant only the faults of this room")
    parser.add_argument("--jobs", type=int, default=2, help="how many faults at the same time")
    flags = parser.parse_args()
    faults = [each for each in read() if flags.room in (None, each.room)]
    for each in faults:
        each.planted()
    faults = faults[date.today().toordinal() % flags.share :: flags.share]
    began, ends = time.monotonic(), Counter[str]()
    with ThreadPoolExecutor(flags.jobs) as pool:
        for fault, end in zip(faults, pool.map(outcome, faults), strict=True):
            ends[end.partition(":")[0]] += 1
            if end != "killed":
                print(f"{end.upper()}: {fault}\n  {shlex.join(fault.tests)}", flush=True)
    counts = ", ".join(f"{count} {end}" for end, count in sorted(ends.items()))
    print(f"{len(faults)} faults in {time.monotonic() - began:.0f} s: {counts}")
    return int(set(ends) != {"killed"})


if __name__ == "__main__":
    sys.exit(main())
