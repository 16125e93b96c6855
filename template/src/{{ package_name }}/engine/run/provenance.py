"""Where a run came from: code, template, packages, machines."""

import json
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

from ..config import as_submitted, snapshot
from ..errors import UsageError, without_secrets
from ..ranks.device import describe_gpu
from ..ranks.world import World

log = logging.getLogger(__name__)

LONGEST_DIFF = 100_000  # characters
# Values that follow the name of a secret and have a digit, in forms such as api_key=...,
# environ["KEY"] = ... and "--token", "...". Only the next 100 characters are searched for the
# digit: in a long line of minified text, a search without a limit would take minutes.
KEYS = re.compile(
    r"""(?ix) ( (?:key|token|secret|passw(?:or)?d)
        (?: ["'\])]* (?::\s?str)? \s*[:=]\s* ["']? | ["']\s*,\s*["'] ) | bearer\s )
    (?=[\w+/=-]{0,99}\d) [\w+/=-]{16,}"""
)


def collect(world: World) -> dict[str, Any]:
    """Return the facts that are needed to explain and repeat a run, for JSON.

    Only the environment variables of Slurm and the container are kept: others may hold secrets.
    """
    code = snapshot()
    diff = hidden(_kept(code, "diff") if code else _diff() or "")
    if len(diff) > LONGEST_DIFF:
        diff = f"{diff[:LONGEST_DIFF]}\n... and {len(diff) - LONGEST_DIFF} characters more"
    # Container images lack git, so the batch script or the image of a release sets the variable.
    commit = os.environ.get("PROJECT_COMMIT") or _git("rev-parse", "HEAD")
    if code:
        commit = _kept(code, "commit") or None
    here = Path.cwd()
    if "CODE_DIR" in os.environ and here / "src" in Path(__file__).parents:
        log.warning("the job runs the newest code, not the submitted one: run 'make image' again")
    if commit is None and any((each / ".git").exists() for each in (here, *here.parents)):
        # For example, git refuses a folder that another user owns.
        log.warning("provenance.json has no commit: run 'git rev-parse HEAD' here to see why")
    packages: dict[str, str] = {}
    for each in distributions():  # in the order of sys.path: the first of a name is imported
        with suppress(OSError, KeyError):  # pip may have left a package half removed
            facts: Any = each.metadata  # parsed at each access
            if facts and (name := facts["Name"]):
                packages.setdefault(name, facts["Version"])
    # Both may hold a secret: the value of a flag, or a login in the template's URL.
    started = json.dumps([sys.argv, _answers()], ensure_ascii=False, default=str)
    command, template = json.loads(hidden(started))
    return {
        "command": command,
        "snapshot": code and code.name,
        "git": {
            "commit": commit,
            "changes": _kept(code, "changes") if code else _git("status", "--short"),
            "diff": diff and f"{diff}\n",
        },
        "template": template,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "packages": dict(sorted(packages.items())),
        "platform": platform.platform(),
        "gpu": describe_gpu(world.device),
        "backend": world.backend,
        "hostnames": list(dict.fromkeys(world.hostnames)),
        "world_size": world.size,
        "launcher": world.launcher,
        "slurm": {
            key: value
            for key, value in sorted(os.environ.items())
            if key.startswith(("SLURM_JOB", "SLURM_ARRAY", "SLURM_RESTART", "SLURM_CLUSTER"))
        },
        # Apptainer sets the first variable. For pyxis, the batch script sets the second one.
        "container": os.environ.get("APPTAINER_CONTAINER") or os.environ.get("PROJECT_IMAGE"),
    }


def _answers() -> Any:  # noqa: ANN401 - any YAML
    """Return the template's answers of this project, None if an image lacks the file."""
    path = as_submitted(Path(".copier-answers.yml"))
    try:
        return yaml.safe_load(path.read_text("utf-8")) if path.exists() else None
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(
            f"{path} is not YAML: {' '.join(str(error).split())}; if an update left a conflict in "
            "it, choose a side"
        ) from None


def hidden(text: str) -> str:
    """Return a text in which everything that looks like a secret is replaced."""
    return without_secrets(KEYS.sub(r"\1<secret>", text))


def _kept(code: Path, name: str) -> str:
    """Return output of git that is stored with the snapshot, "" if there is none."""
    path = code / "git" / name
    return path.read_text("utf-8", "replace").rstrip("\n") if path.exists() else ""


def _diff() -> str | None:
    """Return the difference between the commit and the files, with new files in src/."""
    with suppress(OSError), tempfile.TemporaryDirectory() as folder:
        # New files are added to a copy of git's index, so that the user's index does not change.
        index = shutil.copy2(_git("rev-parse", "--git-path", "index") or "", folder)
        _git("add", "--intent-to-add", "src", GIT_INDEX_FILE=index)
        names = ("slurm/site.sh", "*/.env", ".env", "*/.env.*", "*/.netrc", "*.pem", "*.key")
        paths = (":/", *(f":!{name}" for name in names))  # they may hold secrets
        words = ("diff", "--no-ext-diff", "--no-color", "HEAD", "--", *paths)
        return _git(*words, GIT_INDEX_FILE=index)
    return None


def _git(*arguments: str, **env: str) -> str | None:
    """Return the output of git, None if it fails, for example without git or a repository."""
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
