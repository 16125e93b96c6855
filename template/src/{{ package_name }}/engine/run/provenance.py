"""Where a run came from: code, template, packages, machines."""

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

from ..errors import without_secrets
from ..ranks.world import World

log = logging.getLogger(__name__)

LONGEST_DIFF = 100_000  # characters
# Values that are assigned to a name like api_key or "token", and have a digit.
KEYS = r"(?i)((?:key|token|secret|password)[\"']?\s*[:=]\s*[\"']?)(?=\S*\d)[\w+/=-]{16,}"


def collect(world: World) -> dict[str, Any]:
    """Return what is needed to explain and repeat a run, as plain values.

    Only Slurm's and the container's variables are read: others may hold secrets.
    """
    diff = without_secrets(re.sub(KEYS, r"\1<secret>", _diff() or ""))
    if len(diff) > LONGEST_DIFF:
        diff = f"{diff[:LONGEST_DIFF]}\n... and {len(diff) - LONGEST_DIFF} characters more"
    # Images lack git: the batch script or a release sets the variable.
    commit = os.environ.get("PROJECT_COMMIT") or _git("rev-parse", "HEAD")
    here = Path.cwd()
    if commit is None and any((each / ".git").exists() for each in (here, *here.parents)):
        # Such as where the folder is another user's.
        log.warning("provenance.json has no commit: 'git rev-parse HEAD' fails here and says why")
    packages = (each.metadata for each in distributions())
    answers = Path(".copier-answers.yml")
    return {
        "command": sys.argv,
        "git": {
            "commit": commit,
            "changes": _git("status", "--short"),
            "diff": diff and f"{diff}\n",
        },
        "template": yaml.safe_load(answers.read_text("utf-8")) if answers.exists() else None,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": dict(sorted((each["Name"], each["Version"]) for each in packages)),
        "platform": platform.platform(),
        "hostnames": list(dict.fromkeys(world.hostnames)),
        "world_size": world.size,
        "launcher": world.launcher,
        "slurm": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("SLURM_JOB", "SLURM_ARRAY", "SLURM_RESTART", "SLURM_CLUSTER"))
        },
        # Apptainer sets the first; for pyxis, the batch script sets the second.
        "container": os.environ.get("APPTAINER_CONTAINER") or os.environ.get("PROJECT_IMAGE"),
    }


def _diff() -> str | None:
    """Return the difference between the commit and the code, with new files in src/."""
    with suppress(OSError), tempfile.TemporaryDirectory() as folder:
        # New files are added to a copy of the index, so that the index does not change.
        index = shutil.copy(_git("rev-parse", "--git-path", "index") or "", folder)
        _git("add", "--intent-to-add", "src", GIT_INDEX_FILE=index)
        return _git("diff", "--no-ext-diff", "--no-color", "HEAD", GIT_INDEX_FILE=index)
    return None


def _git(*arguments: str, **env: str) -> str | None:
    """Return what git prints, None where there is no git or no repository."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=True,
            env={**os.environ, "LC_ALL": "C", **env},
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.rstrip("\n")
