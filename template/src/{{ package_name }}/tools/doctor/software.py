"""Checks Python, its packages and PyTorch."""

import ast
import os
import platform
import re
import shutil
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


def python() -> Iterator[Finding]:
    """Report the interpreter and its version."""
    yield Finding("ok", "python", f"{platform.python_version()}, {sys.executable}")


def packages() -> Iterator[Finding]:
    """Compare the installed packages with the dependencies in pyproject.toml."""
    from packaging.requirements import Requirement

    # Python 3.10 has no parser for TOML, but Python writes a list of strings in the same way.
    text = PROJECT.read_text(encoding="utf-8")
    (listed,) = re.findall(r"^dependencies = (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    wrong = []
    for line in ast.literal_eval(listed):
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate():
            continue
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
        yield Finding("ok", "packages", f"all that {PROJECT} asks for")


def pytorch(settings: "Settings | None", jobs: Sequence[Script]) -> Iterator[Finding]:
    """Import PyTorch, and try each GPU."""
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
        name += f", but {', '.join(asking)} train on GPUs: install a build for them, as "
        name += "docs/setup.md says, or check with --device cpu"
        yield Finding("error", "torch", name)
    elif not _is_tested(torch.__version__):
        yield Finding("warning", "torch", f"{name}, newer than the template is tested with")
    else:
        yield Finding("ok", "torch", name)
    if not on_cpu:
        yield from _gpus(torch)


def _is_tested(torch: str) -> bool:
    """Return whether pyproject.toml lists a version of PyTorch as tested with the template."""
    from packaging.requirements import Requirement

    found = re.search(r'^tested = \["(.*)"\]$', PROJECT.read_text(encoding="utf-8"), re.MULTILINE)
    return not found or Requirement(found[1]).specifier.contains(torch, prereleases=True)


def _gpus(torch: ModuleType) -> Iterator[Finding]:
    from ...engine.ranks import driver, topology

    kind = "xpu" if getattr(torch.version, "xpu", None) else "cuda"
    gpus = getattr(torch, kind)
    seen = gpus.device_count() if gpus.is_available() else 0
    given = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    for index in range(seen):
        torch.zeros(1, device=f"{kind}:{index}")  # raises if the GPU is broken or in use
        if far := topology.far_from(gpus.get_device_properties(index)):
            yield Finding("warning", "cores", f"{far}: see docs/speed-and-memory.md")
    if not seen and (old := driver.too_old(torch.version.cuda)):
        yield Finding("error", "GPUs", old)
    elif given > seen:
        message = f"Slurm gave {given} GPU(s), but torch sees {seen}: check that torch is built "
        message += "for them, that nvidia-smi (AMD: rocm-smi) shows them, and that a container "
        message += "has --nv (AMD: --rocm)"
        yield Finding("error", "GPUs", message)
    elif seen:
        names = sorted({gpus.get_device_name(index) for index in range(seen)})
        yield Finding("ok", "GPUs", f"{seen} × {', '.join(names)}{_precision(torch)}")


def _precision(torch: ModuleType) -> str:
    """Return which `--precision` NVIDIA's GPUs are fast at, by their compute capability."""
    if not torch.cuda.is_available() or torch.version.hip:
        return ""
    major, minor = torch.cuda.get_device_capability()
    fast = "bf16" if major >= 8 else "fp16" if major == 7 else "fp32"
    return f" (compute capability {major}.{minor}: fastest with --precision {fast})"
