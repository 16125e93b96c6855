"""Apptainer for the tests, and the files to build an image without a registry.

scripts/install-apptainer.sh makes a root file system that has Apptainer. The command `apptainer`
of this module enters it in new namespaces, so that its mounts disappear when it ends. There it sees
the folders of this machine, and it is root with all capabilities, some of which the root of a
sandbox may not have.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

SYSTEMS = Path("/opt/apptainer-tests")
BASE = SYSTEMS / "base"
COMMAND = """#!/bin/bash
exec unshare --map-root-user --mount --propagation=private ENTER ROOT /usr/bin/apptainer "$@"
"""
ENTER = Path(__file__).parents[2] / "scripts/enter-system.sh"


def missing() -> str | None:
    """Return why this machine can't run Apptainer, or None if it can."""
    return None if SYSTEMS.is_dir() else f"{SYSTEMS} is missing: run scripts/install-apptainer.sh"


def install(folder: Path) -> None:
    """Put the command `apptainer` into a folder."""
    command = folder / "apptainer"
    command.write_text(COMMAND.replace("ENTER", str(ENTER)).replace("ROOT", str(SYSTEMS / "root")))
    command.chmod(0o755)


def download(requirements: Sequence[str], folder: Path) -> None:
    """Download packages for the Python of the base image, from the index of this machine's pip.

    If PyTorch is required, download the build that the tests use: TORCH, from TORCH_INDEX.
    """
    (python,) = (BASE / "usr/lib").glob("python3.*")
    index = os.environ.get("TORCH_INDEX")
    torch = os.environ.get("TORCH", "torch==2.13.0")
    for wanted in ([*(("--index-url", index) if index else ()), torch], [torch, *requirements]):
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"),
                *("--python-version", python.name[len("python") :]),
                *("--dest", folder, "--find-links", folder, *wanted),
            ],
            check=True,
        )
