"""Compiles the C libraries that tests load into other programs."""

import subprocess
from pathlib import Path


def build(source: Path, folder: Path) -> Path:
    """Compile a C file to a shared library in a folder; return the library's path."""
    library = folder / f"{source.stem}.so"
    options = ("-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC")
    subprocess.run(["gcc", *options, "-o", library, source], check=True)
    return library
