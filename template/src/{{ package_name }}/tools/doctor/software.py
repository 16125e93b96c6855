"""Python and its packages."""

import ast
import csv
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .findings import Finding, describe
from .scripts import Script

if TYPE_CHECKING:
    from ...settings import Settings

PROJECT = Path("pyproject.toml")
OLDEST = (3, 10)
# What belongs in git, beside what only one cluster needs.
IN_GIT = (
    *("Makefile", "pyproject.toml", "configs/*.yaml", "scripts/*.sh", "scripts/*.py"),
    *("slurm/*.sh", "slurm/*.sbatch", ":!slurm/site.sh", "src/*.py", "tests/*.py"),
)


def python() -> Iterator[Finding]:
    """Name the interpreter."""
    found = f"{platform.python_version()}, {sys.executable}"
    if sys.version_info < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        yield Finding("error", "python", f"{found}: this needs {wanted} or newer")
    else:
        yield Finding("ok", "python", found)


def packages() -> Iterator[Finding]:
    """Compare what is installed with what pyproject.toml asks for."""
    requirement_type = _requirements()
    wrong, count, damaged = [], 0, False
    for line in dependencies(PROJECT.read_text(encoding="utf-8")):
        requirement = requirement_type(line)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        count += 1
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if lost := lost_files(requirement.name):
            wrong.append(f"{requirement.name} lacks {lost[0]}, which was installed")
            damaged = True
        elif not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, not {requirement.specifier}")
    if wrong:
        cure = "run 'make clean-env setup'" if damaged else "run 'make setup'"
        cure = "run 'make image' again" if in_image() else cure
        yield Finding("error", "packages", f"{', '.join(wrong)}: {cure}")
    else:
        yield Finding("ok", "packages", f"all {count} that {PROJECT} asks for")


def lost_files(package: str) -> list[str]:
    """Return a package's own modules that are gone, as when old files of a scratch are purged."""
    installed = distribution(package)
    # `files` leaves out, since Python 3.12, what is gone.
    record = csv.reader((installed.read_text("RECORD") or "").splitlines())
    files = [row[0] for row in record if row and row[0].endswith(".py")]
    # Not those in folders below: there are thousands, and file systems where each takes its time.
    tops = [file for file in files if len(Path(file).parts) <= 2]
    return [file for file in tops if not Path(str(installed.locate_file(file))).exists()]


def dependencies(text: str) -> list[str]:
    """Return the dependencies in a pyproject.toml.

    Python 3.10 reads no TOML, but a list of strings is written as in Python.

    Raises:
        ValueError: there is no such list.
    """
    found = re.search(r"^dependencies = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"{PROJECT} has no list of dependencies")
    return ast.literal_eval(found[1])


def _requirements() -> type:
    """Return what reads a requirement: of `packaging`, or of the copy of it that pip brings."""
    try:
        module = import_module("packaging.requirements")
    except ImportError:
        module = import_module("pip._vendor.packaging.requirements")
    return module.Requirement


def pytorch(settings: "Settings | None", jobs: Sequence[Script]) -> Iterator[Finding]:
    """Import PyTorch, and use each GPU that there is."""
    try:
        torch = import_module("torch")
    except Exception as error:
        yield Finding("error", "torch", f"can't be imported: {describe(error)}: run 'make setup'")
        return
    kinds = {kind: getattr(torch.version, kind, None) for kind in ("cuda", "hip", "xpu")}
    built = " ".join(f"{kind} {version}" for kind, version in kinds.items() if version)
    name = f"{torch.__version__}, built {'for ' + built if built else 'without GPUs'}"
    if settings and settings.device == "cpu":
        yield Finding("ok", "torch", name)
        return
    asking = [str(job.path) for job in jobs if job.gpus and not job.image]
    if asking and not built and shutil.which("sbatch"):
        yield Finding(
            "error",
            "torch",
            f"{name}, but there are GPUs in {', '.join(asking)}: install a build for them, as "
            "README.md says under 'Set up', or check with --device cpu",
        )
    else:
        yield Finding("ok", "torch", name)
    yield from _gpus(torch)


def _gpus(torch: ModuleType) -> Iterator[Finding]:
    kind = "xpu" if getattr(torch.version, "xpu", None) else "cuda"
    gpus = getattr(torch, kind)
    seen = gpus.device_count() if gpus.is_available() else 0
    given = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    for index in range(seen):
        torch.zeros(1, device=f"{kind}:{index}")  # one that is broken or taken raises here
    names = sorted({gpus.get_device_name(index) for index in range(seen)})
    if given > seen:
        yield Finding(
            "error",
            "GPUs",
            f"Slurm gave {given} GPU(s), but torch sees {seen}: is this a build for them, does "
            "nvidia-smi (AMD: rocm-smi) see them, and does a container run with --nv (--rocm)?",
        )
    elif seen:
        yield Finding("ok", "GPUs", f"{seen} × {', '.join(names)}")


def repository() -> Iterator[Finding]:
    """Name files of the project that git ignores."""
    if not shutil.which("git"):
        return
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", *IN_GIT]
    ignored = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    if ignored:
        first, more = ignored[0], f" and {len(ignored) - 1} more" if ignored[1:] else ""
        yield Finding(
            "warning",
            "git",
            f"ignores {first}{more}: clones lack such files, and an update of the template "
            f"overwrites edits in them: 'git check-ignore -v {first}' names the rule, 'git add -f' "
            "adds a file",
        )


def in_image() -> bool:
    """Whether this process runs in a container image."""
    return "APPTAINER_CONTAINER" in os.environ or "PROJECT_IMAGE" in os.environ
