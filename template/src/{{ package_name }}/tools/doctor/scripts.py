"""Checks that the batch scripts that train can start, and that Slurm accepts them.

The facts come from the scripts and not from .copier-answers.yml, because users edit scripts.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...engine.ranks.slurm_commands import run
from .findings import Finding

# The lines that find the interpreter or the image.
START = re.compile(r'^cd "\$\{SLURM_SUBMIT_DIR.*?^use_(?:python|image) [^\n]*$', re.M | re.S)
# What is run after these lines. `fail` is a function of slurm/common.sh.
PYTHON = """
version=$("${python[@]}" --version) || fail "${python[*]} does not start: run 'make %s' again"
echo "${python[0]}|$version${LOADEDMODULES:+, modules $LOADEDMODULES}"
"""
PYXIS = """
srun --help | grep -q -e --container-image || fail "srun has no option --container-image"
echo "srun|$image${LOADEDMODULES:+, modules $LOADEDMODULES}"
"""
TIMEOUT = 120  # seconds for modules and an image; file systems can be slow
# Login nodes often lack these, and compute nodes have them.
RUNTIMES = re.compile("neither apptainer nor singularity|--container-image")


@dataclass(frozen=True)
class Script:
    """A batch script.

    Args:
        start: its lines up to use_python or use_image; empty if it has neither.
        gpu: whether it trains on GPUs.
        image: whether it runs in a container image.
        pyxis: whether srun starts that image.
    """

    path: Path
    start: str
    gpu: bool
    image: bool
    pyxis: bool


def read(folder: Path) -> list[Script]:
    """Return the scripts that train."""
    found = []
    for path in sorted(folder.glob("train_*.sbatch")):
        text = path.read_text(encoding="utf-8", errors="replace")
        start = START.search(text)
        image, pyxis = "\nuse_image " in text, '"${in_image[@]}"' in text
        gpu = "\ncount_ranks gpu" in text
        found.append(Script(path, start[0] if start else "", gpu, image, pyxis))
    return found


def check(jobs: Sequence[Script]) -> Iterator[Finding]:
    """Load the modules as the scripts do, and start the interpreter or the image."""
    if not jobs:
        message = "there is no slurm/train_*.sbatch here: run doctor in the project's root"
        yield Finding("warning", "scripts", message)
    if not shutil.which("sbatch"):
        return
    alike: dict[tuple[str, bool], list[Script]] = {}
    for job in jobs:
        alike.setdefault((job.start, job.pyxis), []).append(job)
    for same in alike.values():
        yield _start(same[0], ", ".join(str(job.path) for job in same))


def _start(job: Script, names: str) -> Finding:
    """Run what a script runs before it trains."""
    if not job.start:
        message = f"{names}: no line use_python or use_image, so its start is not checked"
        return Finding("ok", "scripts", message)
    rest = PYXIS if job.pyxis else PYTHON % ("image" if job.image else "setup")
    try:
        done = subprocess.run(
            ["bash", "-l", "-c", job.start + rest],
            env={"SLURM_JOB_ID": "0", **os.environ, "SLURM_SUBMIT_DIR": os.getcwd()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        message = f"{names} did not start within {TIMEOUT} s: is a file system slow?"
        return Finding("error", "scripts", message)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        message = errors[-1].removeprefix("error: ") if errors else f"exit code {done.returncode}"
        if RUNTIMES.search(message) and "SLURM_JOB_ID" not in os.environ:
            message = f"{names} can't be tried here: {message} (compute nodes may differ)"
            return Finding("warning", "scripts", message)
        return Finding("error", "scripts", f"{names} would end at once: {message}")
    used, _, version = done.stdout.splitlines()[-1].partition("|")
    if job.image:
        message = f"{names}: {version}; doctor.sbatch checks the packages in the image"
    elif Path(used).parents[1].resolve() != Path(sys.prefix).resolve():
        message = f"{names} use {used}, but packages were checked for {sys.executable}: "
        return Finding("warning", "scripts", message + f"run doctor with {used}")
    else:
        message = f"{names}: {used}, {version}"
    return Finding("ok", "scripts", message)


def check_submission(jobs: Sequence[Script]) -> Iterator[Finding]:
    """Ask Slurm whether it accepts the scripts, and pass on its answers."""
    if "SLURM_JOB_ID" in os.environ:  # compute nodes may not be allowed to submit
        return
    if not shutil.which("sbatch"):
        message = "sbatch is not here, so whether Slurm accepts the scripts is not checked"
        yield Finding("ok", "Slurm", message)
        return
    for job in jobs:
        answer = run("sbatch", "--test-only", str(job.path))
        # sbatch --test-only writes its answer to stderr, also if it accepts the script.
        lines = answer.stderr.strip().splitlines() or ["(no output)"]
        if answer.returncode:
            message = f"refuses {job.path}: {lines[-1]}: change its #SBATCH lines"
            yield Finding("error", "Slurm", message)
            continue
        when = re.search(r"to start at (\S+) .* on nodes (\S+)", answer.stderr)
        start = f", which would start at {when[1]} on {when[2]}" if when else ""
        yield Finding("ok", "Slurm", f"accepts {job.path}{start}")
