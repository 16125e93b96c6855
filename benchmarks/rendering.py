"""Seconds until a project is there: against Copier with nothing to decide, and cookiecutter."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .compare import Comparison, in_turns
from .ranks import REPOSITORY, Setting, project


def measure(_setting: Setting, repeats: int) -> list[Comparison]:
    """Compare `copier copy` of this template with templates of the same files, with no choices."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours, plain, cookie = (folder / name for name in ("ours", "plain", "cookie"))
        for name in ("hooks", "template"):
            shutil.copytree(REPOSITORY / name, ours / name)
        shutil.copy(REPOSITORY / "copier.yml", ours)
        ignored = shutil.ignore_patterns(".git", "__pycache__")
        shutil.copytree(project(), plain / "template", ignore=ignored)
        (plain / "copier.yml").write_text("_subdirectory: template\n")
        shutil.copytree(project(), cookie / "{{ cookiecutter.name }}", ignore=ignored)
        options = {"name": "demo", "_copy_without_render": ["*"]}
        (cookie / "cookiecutter.json").write_text(json.dumps(options))
        copier = ("copier", "copy", "--quiet", "--defaults")
        comparison = Comparison(
            title="Rendering a project",
            unit="s",
            baseline="Copier, the same files without a choice",
            figures=in_turns(
                {
                    "this template": lambda: run(*copier, str(ours)),
                    "Copier, the same files without a choice": lambda: run(*copier, str(plain)),
                    "cookiecutter, the same files": lambda: run(
                        "cookiecutter", "--no-input", str(cookie), "--output-dir"
                    ),
                },
                repeats,
            ),
            target="within 1.5 of Copier's own time",
        )
    comparison.met = comparison.ratios["this template"] <= 1.5
    return [comparison]


def run(module: str, *arguments: str) -> float:
    """Return the seconds that a command takes, whose last argument is a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", module, *arguments, f"{folder}/new"], check=True)
        return time.perf_counter() - began
