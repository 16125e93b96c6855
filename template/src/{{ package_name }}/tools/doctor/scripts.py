"""Checks that the batch scripts for training can start, and that Slurm accepts them.

It reads the scripts and not .copier-answers.yml, because users edit scripts.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...engine.ranks.slurm_commands import ask, run, said
from .findings import Finding

# The lines of a script that find the interpreter or the image.
START = re.compile(r'^cd "\$\{SLURM_SUBMIT_DIR.*?^use_(?:python|image) [^\n]*$', re.M | re.S)
# The commands that are run after these lines. `fail` is a function of slurm/common.sh. With pyxis,
# srun starts the interpreter in the image, and the variable `python` does not exist.
VERSION = """
[[ -z ${python+set} ]] || version=$("${python[@]}" --version) ||
    fail "${python[*]} does not start: run 'make %s' again"
echo "${image:-${python[0]}} ${version:-}${LOADEDMODULES:+, modules $LOADEDMODULES}"
"""


class Script(NamedTuple):
    """A batch script.

    Attributes:
        path: path of the script.
        start: its lines up to use_python or use_image, or "" if it has neither.
        gpu: whether it trains on GPUs.
        image: whether it runs in a container image.
    """

    path: Path
    start: str
    gpu: bool
    image: bool


def read(folder: Path) -> list[Script]:
    """Return the batch scripts for training."""
    found = []
    for path in sorted(folder.glob("train_*.sbatch")):
        text = path.read_text(encoding="utf-8", errors="replace")
        start = START.search(text)
        gpu, image = "\ncount_ranks gpu" in text, "\nuse_image " in text
        found.append(Script(path, start[0] if start else "", gpu, image))
    return found


def check(jobs: Sequence[Script], run_root: Path | None) -> Iterator[Finding]:
    """Run each script up to the start of its interpreter, and ask Slurm whether it accepts it."""
    partitions = set()
    if not jobs:
        message = "there is no slurm/train_*.sbatch here: run doctor in the project's root"
        yield Finding("warning", "scripts", message)
    elif not shutil.which("sbatch"):
        yield Finding("ok", "scripts", "sbatch is missing: run doctor on a login node too")
        return
    if given := sorted(name for name in os.environ if name.startswith("SBATCH_")):
        message = f"your environment has {', '.join(given)}: sbatch takes them before the lines of"
        yield Finding("warning", "scripts", f"{message} a script; unset those that you do not want")
    for job in jobs:
        if job.start:
            yield _start(job)
        if "SLURM_JOB_ID" not in os.environ:  # some clusters forbid sbatch on compute nodes
            yield (answer := _submission(job.path))
            partitions.update(re.findall(r" in partition (\S+)", answer.message))
    if partitions and shutil.which("scontrol"):
        yield from _preemption(partitions, run_root)


def _start(job: Script) -> Finding:
    """Load the modules as a script does, and start the interpreter or find the image."""
    script = "CODE_SNAPSHOT=0\n" + job.start + VERSION % ("image" if job.image else "setup")
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "SLURM_JOB_ID": "0", "SLURM_SUBMIT_DIR": os.getcwd()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if not done.returncode and done.stdout:
        return Finding("ok", "scripts", f"{job.path}: {done.stdout.splitlines()[-1]}")
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    message = errors[-1].removeprefix("error: ") if errors else f"exit code {done.returncode}"
    of_bash = [line for line in done.stderr.splitlines() if re.search(r": line \d+: ", line)]
    message = "; ".join([message, *of_bash[-1:]])
    if "neither apptainer nor singularity" in message and "SLURM_JOB_ID" not in os.environ:
        return Finding("warning", "scripts", f"{job.path}: {message} (compute nodes may have it)")
    return Finding("error", "scripts", f"{job.path} would end at once: {message}")


def _preemption(partitions: set[str], run_root: Path | None) -> Iterator[Finding]:
    """Compare the time that a preempted job has with the time that the last checkpoint took."""
    config = _pairs(r"^(\w+) *= (\S*)", ask("scontrol", "show", "config"))
    by_qos = config.get("PreemptType", "").endswith("qos")
    if not by_qos and not config.get("PreemptType", "").endswith("partition_prio"):
        return
    shown = ask("scontrol", "--oneliner", "show", "partition").splitlines()
    facts = {each["PartitionName"]: each for each in (_pairs(r"(\w+)=(\S*)", s) for s in shown)}
    saves = run_root.glob("*/*/checkpoints/save_seconds") if run_root else ()
    last = max(saves, key=lambda path: path.stat().st_mtime, default=None)
    took = float(last.read_text("utf-8")) if last else 0.0
    for name in sorted(partitions & facts.keys()):
        mode, tier = facts[name]["PreemptMode"], int(facts[name]["PriorityTier"])
        above = any(int(each["PriorityTier"]) > tier for each in facts.values())
        if mode == "OFF" or not (by_qos or above):
            continue
        grace, wait = int(facts[name]["GraceTime"]), int(config.get("KillWait", 30))
        # Slurm signals a cancelled job as it does a requeued one, but the job does not come back.
        seconds = grace if "CANCEL" in mode else grace + wait
        message = (
            f"Slurm may stop jobs in {name} for others (PreemptMode {mode}): their ranks have "
        )
        message += f"{seconds} s to save a checkpoint (GraceTime {grace}, KillWait {wait})"
        message += "; the QOS may change this" if by_qos else ""
        if took > seconds:
            message += f", and {last} took {took:.0f}: a stopped job goes on from the checkpoint "
            message += "before, so save more often, with a smaller checkpoint_every"
        yield Finding("warning" if took > seconds else "ok", "preemption", message)


def _pairs(pattern: str, text: str) -> dict[str, str]:
    return dict(re.findall(pattern, text, re.MULTILINE))


def _submission(path: Path) -> Finding:
    """Return Slurm's answer to a script as a finding."""
    answer = run("sbatch", "--test-only", str(path))
    line = said(answer)  # sbatch --test-only always writes to stderr, even if it accepts
    if answer.returncode:
        cure = "change its #SBATCH lines"
        if "requeue=expedite" in path.read_text("utf-8") and re.search("requeue|not supp", line):
            cure = "--requeue=expedite needs Slurm 25.11 or newer, whose settings have " + (
                "enable_expedited_requeue: without it, use --requeue"
            )
        return Finding("error", "Slurm", f"refuses {path}: {line}: {cure}")
    return Finding("ok", "Slurm", f"accepts {path}: {line}")
