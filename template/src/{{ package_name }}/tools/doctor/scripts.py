"""What the batch scripts that train ask for, and whether it is there.

The scripts are read, not the template's answers: they are what Slurm reads, and users edit them.
"""

import argparse
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .findings import Finding

# From an empty shell to the modules: a script that was edited beyond this is none the worse.
PROLOGUE = re.compile(
    r'^cd "\$\{SLURM_SUBMIT_DIR.*?(?=^set -euo pipefail$)', re.MULTILINE | re.DOTALL
)
# Where the project builds its image. Else others have made it, and there is ENV for what it lacks.
DEFINITION, ENV = Path("container/apptainer.def"), Path("container/env")
FIRST_CODE = 100  # of the exit codes that tell which line failed
TIMEOUT = 120  # seconds for modules and an image; file systems can be slow


@dataclass(frozen=True)
class Script:
    """A batch script.

    Args:
        options: sbatch's options by long name, as the script and the environment give them.
        prologue: its lines that fetch the site's facts and the modules; may be empty.
        modules: those that it loads, in their order.
        python: the interpreter that it runs; image: the container image. One of them is None.
        pyxis: whether it is srun that starts the image.
    """

    path: Path
    options: argparse.Namespace
    prologue: str
    modules: tuple[str, ...]
    python: str | None
    image: str | None
    pyxis: bool = False

    @property
    def gpus(self) -> tuple[str, int] | None:
        """The type of GPU ('' for any) and how many a node must have, None without GPUs."""
        options = self.options
        asked = [part for part in (options.gres or "").split(",") if part.startswith("gpu")]
        request = options.gpus_per_node or options.gpus_per_task or options.gpus
        words = (request or "".join(asked[:1])).split(":")
        if words == [""]:
            return None
        count = int(words.pop()) if words[-1].isdigit() else 1
        if options.gpus_per_task and options.ntasks_per_node:
            count *= int(options.ntasks_per_node)
        elif options.gpus and options.nodes.isdigit():
            count = -(-count // int(options.nodes))
        return "".join(word for word in words if word != "gpu"), count


def read(folder: Path) -> tuple[list[Script], list[Finding]]:
    """Return the scripts that train, and what is wrong with those that can't be read."""
    scripts, wrong = [], []
    for path in sorted(folder.glob("train_*.sbatch")):
        try:
            scripts.append(_read(path))
        except (OSError, ValueError) as error:
            wrong.append(Finding("error", "scripts", f"{path} can't be read: {error}"))
    if not scripts and not wrong:
        message = f"there is no {folder}/train_*.sbatch here: is this the project's root?"
        wrong.append(Finding("warning", "scripts", message))
    return scripts, wrong


def _read(path: Path) -> Script:
    text = path.read_text(encoding="utf-8")
    words = [
        word
        for line in re.findall(r"^#SBATCH\s+(.*)", text, re.MULTILINE)
        for word in shlex.split(line, comments=True)
    ]
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for *names, variable in (
        ("--partition", "-p", "PARTITION"),
        ("--time", "-t", "TIMELIMIT"),
        ("--nodes", "-N", "NODES"),
        ("--account", "-A", "ACCOUNT"),
        ("--qos", "-q", "QOS"),
        ("--gres", "GRES"),
        ("--gpus-per-node", "GPUS_PER_NODE"),
        ("--gpus-per-task", "GPUS_PER_TASK"),
        ("--gpus", "-G", "GPUS"),
        ("--ntasks-per-node", "NTASKS_PER_NODE"),
    ):
        parser.add_argument(*names, default="")
        # sbatch lets a variable override the script.
        if given := os.environ.get(f"SBATCH_{variable}"):
            words += [names[0], given]
    prologue = PROLOGUE.search(text)
    return Script(
        path,
        parser.parse_known_args(words)[0],
        prologue[0] if prologue else "",
        tuple(re.findall(r"^(?:load_module|module load) +(\S+)", text, re.MULTILINE)),
        _used("python", text),
        _used("image", text),
        '"${in_image[@]}"' in text,
    )


def _used(kind: str, text: str) -> str | None:
    found = re.search(rf"^use_{kind} (\S+)", text, re.MULTILINE)
    return found[1] if found else None


def check(jobs: Sequence[Script]) -> Iterator[Finding]:
    """Load the modules as the scripts do, and start the interpreter or the image with them."""
    if not shutil.which("sbatch"):
        return
    alike: dict[tuple, list[Script]] = {}
    for job in jobs:
        alike.setdefault((job.modules, job.python, job.image), []).append(job)
    for same in alike.values():
        names = ", ".join(str(job.path) for job in same)
        yield from _start(same[0], names)


def _start(job: Script, names: str) -> Iterator[Finding]:
    """Run what a script runs before it trains, line by line."""
    started = job.image or job.python or "python"
    cure = "make image" if job.image else "make setup"
    needed = []
    if job.image:
        needed = [Path(started)] * (not job.pyxis) + [ENV] * (not DEFINITION.exists())
    for path in needed:
        if not path.exists():
            message = f"{path} of {names} does not exist: run '{cure}' first"
            yield Finding("error", "interpreter", message)
            return
    # What is looked at, the line, and what it means if that fails.
    lines = []
    if job.pyxis:
        missing = "srun has no --container-image here: compute nodes may have it, else pyxis lacks"
        lines.append(("pyxis", "srun --help | grep -q -e --container-image", missing))
        run = "echo by srun"
    elif job.image:
        missing = f"there is neither apptainer nor singularity on {socket.gethostname()}: compute "
        missing += "nodes may have it, or its module belongs in slurm/site.sh"
        python = "python" if DEFINITION.exists() else ENV / "bin/python"
        runtime = "runtime=$(command -v apptainer || command -v singularity)"
        lines.append(("apptainer", runtime, missing))
        run = f'"$runtime" exec --bind "$PWD" {job.image} {python} --version'
    else:
        absent = f"{started} of {names}, or PROJECT_PYTHON of slurm/site.sh, does not exist: "
        absent += f"run '{cure}' first, or change the latter"
        found = f"python=${{PROJECT_PYTHON:-{started}}}; [[ -x $python ]]"
        lines.append(("interpreter", found, absent))
        run = 'echo "$python" && "$python" --version'
    lines.append(("interpreter", run, f"{started} of {names} does not start: run '{cure}' again"))
    try:
        done = subprocess.run(
            ["bash", "-l", "-c", job.prologue + _or_exit(line for _, line, _ in lines)],
            env={"SLURM_JOB_ID": "0", **os.environ, "SLURM_SUBMIT_DIR": os.getcwd()},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        message = f"{started} of {names} did not start within {TIMEOUT} s: is a file system slow?"
        yield Finding("error", "interpreter", message)
        return
    if 0 < done.returncode < FIRST_CODE:
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        message = said[-1].removeprefix("error: ") if said else f"exit code {done.returncode}"
        yield Finding("error", "scripts", f"{names} would end at once: {message}")
        return
    if done.returncode:
        name, _, message = lines[done.returncode - FIRST_CODE]
        # Login nodes often lack what compute nodes have.
        elsewhere = name in ("apptainer", "pyxis") and "SLURM_JOB_ID" not in os.environ
        yield Finding("warning" if elsewhere else "error", name, message)
        return
    if job.modules:
        yield Finding("ok", "modules", f"{', '.join(job.modules)} of {names}")
    *_, used, answer = ["", *done.stdout.splitlines()]
    yield Finding("ok", "interpreter", f"{started} of {names}: {answer.removeprefix('Python ')}")
    if job.image:
        yield Finding("ok", "image", "its packages are checked when doctor runs in it, in a job")
    elif Path(used).parents[1].resolve() != Path(sys.prefix).resolve():
        message = f"packages were checked for {sys.executable}, but jobs use {used}: run that"
        yield Finding("warning", "interpreter", message)


def _or_exit(lines: Iterable[str]) -> str:
    """Return lines of the shell of which the first that fails gives the exit code."""
    return "\n".join(f"{line} || exit {FIRST_CODE + n}" for n, line in enumerate(lines))
