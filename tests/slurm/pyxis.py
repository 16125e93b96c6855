"""A stand-in for pyxis that is compiled for this machine's Slurm."""

import shutil
from pathlib import Path

import compiler

SOURCE = Path(__file__).with_suffix(".c")
HEADER = Path("/usr/include/slurm/spank.h")


def missing() -> str | None:
    """Return why the plugin can't be compiled here, or None if it can."""
    if not shutil.which("gcc") or not HEADER.exists():
        return f"gcc or {HEADER} is missing: run scripts/install-slurm.sh"
    return None


def build(folder: Path) -> str:
    """Compile the plugin into a folder; return the line of plugstack.conf that loads it."""
    plugin = compiler.build(SOURCE, folder)
    plugin.chmod(0o755)
    return f"required {plugin}\n"
