"""Where a run came from: code, template, packages, machines."""

import os
import platform
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

from ..ranks.world import World

ANSWERS = Path(".copier-answers.yml")


def collect(world: World) -> dict[str, Any]:
    """Return what is needed to tell how a run came about, as plain values.

    Of the environment only Slurm's and the container's facts are taken: the rest may hold secrets.
    """
    return {
        "command": sys.argv,
        "git": {"commit": _commit(), "changes": _git("status", "--short")},
        "template": yaml.safe_load(ANSWERS.read_text("utf-8")) if ANSWERS.exists() else None,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": _packages(),
        "platform": platform.platform(),
        "hostnames": list(dict.fromkeys(world.hostnames)),
        "world_size": world.size,
        "launcher": world.launcher,
        "slurm": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("SLURM_JOB", "SLURM_ARRAY", "SLURM_RESTART", "SLURM_CLUSTER"))
        },
        # Apptainer says it itself; for pyxis, the batch script does.
        "container": os.environ.get("APPTAINER_CONTAINER") or os.environ.get("PROJECT_IMAGE"),
    }


def _packages() -> dict[str, str]:
    # A distribution reads its file again for its name and for its version.
    found = (each.metadata for each in distributions())
    return dict(sorted((each["Name"], each["Version"]) for each in found))


def _commit() -> str | None:
    """Return the commit of the code, as the batch script or a release says it: images lack git."""
    return os.environ.get("PROJECT_COMMIT") or _git("rev-parse", "HEAD")


def _git(*arguments: str) -> str | None:
    """Return what git prints, None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
