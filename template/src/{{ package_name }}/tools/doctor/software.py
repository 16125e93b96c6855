"""Python and its packages."""

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from .findings import Finding, describe
from .scripts import Script

if TYPE_CHECKING:
    from ...settings import Settings

PROJECT = Path("pyproject.toml")
# Files that belong in git; slurm/site.sh is for one cluster only.
IN_GIT = (
    *("Makefile", "pyproject.toml", "configs/*.yaml", "scripts/*.sh", "scripts/*.py"),
    *("slurm/*.sh", "slurm/*.sbatch", ":!slurm/site.sh", "src/*.py", "tests/*.py"),
)


def python() -> Iterator[Finding]:
    """Name the interpreter."""
    yield Finding("ok", "python", f"{platform.python_version()}, {sys.executable}")


def packages() -> Iterator[Finding]:
    """Compare the installed packages with the dependencies in pyproject.toml."""
    try:
        requirement_type = import_module("packaging.requirements").Requirement
    except ImportError:  # pip has a copy
        requirement_type = import_module("pip._vendor.packaging.requirements").Requirement
    wrong, count = [], 0
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
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, not {requirement.specifier}")
    if wrong:
        in_image = "APPTAINER_CONTAINER" in os.environ or "PROJECT_IMAGE" in os.environ
        command = "make image' again" if in_image else "make setup'"
        yield Finding("error", "packages", f"{', '.join(wrong)}: run '{command}")
    else:
        yield Finding("ok", "packages", f"all {count} that {PROJECT} asks for")


def dependencies(text: str) -> list[str]:
    """Return the dependencies in a pyproject.toml.

    Python 3.10 has no parser for TOML, but Python writes a list of strings in the same way.

    Raises:
        ValueError: the text has no such list.
    """
    found = re.search(r"^dependencies = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise ValueError(f"{PROJECT} has no list of dependencies")
    return ast.literal_eval(found[1])


def pytorch(settings: "Settings | None", jobs: Sequence[Script]) -> Iterator[Finding]:
    """Import PyTorch, and use each GPU."""
    try:
        torch = import_module("torch")
    except Exception as error:
        yield Finding("error", "torch", f"can't be imported: {describe(error)}: run 'make setup'")
        return
    kinds = {kind: getattr(torch.version, kind, None) for kind in ("cuda", "hip", "xpu")}
    built = " ".join(f"{kind} {version}" for kind, version in kinds.items() if version)
    name = f"{torch.__version__}, built {'for ' + built if built else 'without GPUs'}"
    on_cpu = settings and settings.device == "cpu"
    asking = [str(job.path) for job in jobs if job.gpu and not job.image]
    if asking and not built and not on_cpu and shutil.which("sbatch"):
        name += f", but {', '.join(asking)} train on GPUs: install a build for them, as README.md "
        name += "says under 'Set up', or check with --device cpu"
        yield Finding("error", "torch", name)
    else:
        yield Finding("ok", "torch", name)
    if not on_cpu:
        yield from _gpus(torch)


def _gpus(torch: ModuleType) -> Iterator[Finding]:
    kind = "xpu" if getattr(torch.version, "xpu", None) else "cuda"
    gpus = getattr(torch, kind)
    seen = gpus.device_count() if gpus.is_available() else 0
    given = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    for index in range(seen):
        torch.zeros(1, device=f"{kind}:{index}")  # raises if the GPU is broken or in use
    names = sorted({gpus.get_device_name(index) for index in range(seen)})
    if given > seen:
        message = f"Slurm gave {given} GPU(s), but torch sees {seen}: check that torch is built "
        message += "for them, that nvidia-smi (AMD: rocm-smi) shows them, and that a container "
        message += "has --nv (AMD: --rocm)"
        yield Finding("error", "GPUs", message)
    elif seen:
        yield Finding("ok", "GPUs", f"{seen} × {', '.join(names)}")


def repository() -> Iterator[Finding]:
    """Name the files of the project that git ignores."""
    if not shutil.which("git"):
        return
    command = ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", *IN_GIT]
    ignored = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    if ignored:
        first, more = ignored[0], f" and {len(ignored) - 1} more" if ignored[1:] else ""
        message = f"ignores {first}{more}: clones lack such files, and an update of the template "
        message += f"overwrites your edits of them: 'git check-ignore -v {first}' names the rule, "
        yield Finding("warning", "git", message + "'git add -f' adds a file")
