"""Seconds to make a project, compared with Copier without choices, and with cookiecutter."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from copier import run_copy

from .compare import Comparison, in_turns
from .ranks import REPOSITORY, Setting, project

MOST = 1.5  # target: at most so many times Copier's own time
VARIANTS = 16  # number of the pairwise variants of tests/render/variants.py


def measure(_setting: Setting, repeats: int) -> list[Comparison]:
    """Compare `copier copy` of this template with templates of the same files without choices."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        ours, plain, cookie = (folder / name for name in ("ours", "plain", "cookie"))
        for name in ("examples", "hooks", "template"):
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
            title="Time to render a project",
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
            target=f"within {MOST} of Copier's own time",
            limit=MOST,
        )
    comparison.met = comparison.ratios["this template"] <= MOST
    return [comparison, measure_matrix(repeats)]


def measure_matrix(repeats: int) -> Comparison:
    """Compare how fast the tests' renderer and Copier render variants in one process."""
    sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "render")]
    from renderer import Renderer, copy_template
    from variants import pairwise_variants

    variants = pairwise_variants()[:VARIANTS]
    with tempfile.TemporaryDirectory() as scratch:
        template = copy_template(Path(scratch) / "template")

        def plainly(answers: Mapping[str, object]) -> None:
            with tempfile.TemporaryDirectory() as folder:
                data = dict(answers)
                run_copy(str(template), f"{folder}/new", data=data, defaults=True, quiet=True)

        def rate(render: Callable[[Mapping[str, object]], object]) -> float:
            began = time.perf_counter()
            for answers in variants:
                render(answers)
            return len(variants) / (time.perf_counter() - began)

        return Comparison(
            title="Renders per second in the tests",
            unit="renders/s",
            baseline="Copier alone",
            figures=in_turns(
                {
                    "the tests' renderer": lambda: rate(Renderer(template)),
                    "Copier alone": lambda: rate(plainly),
                },
                repeats,
            ),
        )


def run(module: str, *arguments: str) -> float:
    """Return the seconds of a command whose last argument is a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", module, *arguments, f"{folder}/new"], check=True)
        return time.perf_counter() - began
