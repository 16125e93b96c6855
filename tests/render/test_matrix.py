"""All variants are rendered with the right, complete files, which look as if written by hand."""

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import yaml
from classes import Classes, shared, unnamed
from renderer import QUESTIONNAIRE, TEMPLATE, Renderer, tomllib
from variants import (
    MATRICES,
    TREES,
    Answers,
    Tree,
    complete,
    expected_dependencies,
    unsampled,
)

# What Jinja or a hand in a hurry leaves behind. Apptainer's and GitHub's own braces may stay.
LEFTOVERS = re.compile(r"\{%|%\}|\{=#|#=\}|\{\{|\}\}|[ \t]+$|\n\n\n\n|\Z(?<!\n)", re.MULTILINE)
# Lines: what a newcomer reads in one go, and what is worth a page of its own.
LONGEST_README, SHORTEST_PAGE = 200, 30
# GitHub's, Apptainer's, and the shell's ${A:-${B}}.
OWN_BRACES = re.compile(r"\$\{\{ [\w. |]+ \}\}|\{\{ [A-Z_]+ \}\}|\$\{\w+:-\$\{[^{}]+\}\}")

CODE = (".sbatch", ".sh", ".py")
# Lines of a script that shellcheck does not read; `#SBATCH` begins one, too.
COMMENT = re.compile(r"^ *#(?!!| shellcheck ).*\n", re.MULTILINE)

CONTENT: dict[Tree, str] = {}  # a digest of the files of each tree, with other names left out
COUNTS = {
    "launch": 7 * 2 * (2 * 3 + 1),
    "tracking": 2 * (1 + 4 * 2 + 6 * 4 + 4 * 5 + 6 + 2 * 16),
}


def test_every_question_has_samples() -> None:
    assert not unsampled()


@pytest.mark.parametrize("matrix", MATRICES)
def test_variants(classes: Classes, matrix: str) -> None:
    variants = [each for each in classes.variants if each.matrix == matrix]
    for variant in variants:
        check(variant.answers, variant.files)
    assert len(variants) == COUNTS.get(matrix, len(variants))


@pytest.mark.parametrize("matrix", ["launch", pytest.param("others", marks=pytest.mark.slow)])
def test_code_passes_the_linters(
    classes: Classes, tool: dict[str, str], tmp_path: Path, matrix: str
) -> None:
    """Shellcheck reads the functions that scripts share again for each script."""
    found: dict[bool, dict[str, tuple[str, str, dict[str, str]]]] = {True: {}, False: {}}
    for variant in classes.variants:
        for path, text in variant.files.items():
            if path.endswith(CODE):
                code = linted(path, text, variant.package)
                known = found[variant.matrix == "launch"]
                known.setdefault(code, (path, text, shared(variant.files)))
    launch, others = found[True], found[False]
    new = {code: each for code, each in others.items() if code not in launch}
    lint((launch if matrix == "launch" else new).values(), tool, tmp_path)


def test_each_condition_of_a_file_decides(classes: Classes, render: Renderer) -> None:
    """The smallest project has no file that another answer could need, and some project has it."""
    patterns = dict(re.findall(r"^ +\((.+), '(/[^']+)'\),$", QUESTIONNAIRE["_exclude"][0], re.M))
    paths = " ".join(patterns.values()).split()
    nothing: Answers = {"launch_modes": ["cpu"], "example": "text", "tools": [], "trackers": []}
    least = render({**nothing, "requeue": False, "license": "none"}).keys()
    every = {path for variant in classes.variants for path in variant.files}
    assert len(paths) > 40
    for path in paths:
        inside = re.compile(re.escape(path[1:]).replace(r"\*", "[^/]*") + "(/|$)")
        assert any(inside.match(each) for each in every), f"{path} is in no project"
        if path != "/slurm/train_cpu.sbatch":
            assert not any(inside.match(each) for each in least), path


def test_every_file_of_the_template_is_in_some_project(classes: Classes) -> None:
    every = {path for variant in classes.variants for path in variant.files}
    names = {path.rpartition("/")[2] for path in every}
    for path in (TEMPLATE / "template").rglob("*"):
        if path.is_file() and not {"__pycache__", ".ruff_cache"} & {*path.parts}:
            named = path.name.removesuffix(".jinja")
            assert named in names or "answers_file" in named, path


def linted(path: str, text: str, package: str) -> str:
    """Return what decides about the findings of linters in a file."""
    return text if path.endswith(".py") else COMMENT.sub("", unnamed(text, package))


@cache
def leftover(text: str) -> str:
    """Return what Jinja left behind in a text, with what is around it; "" if there is nothing."""
    found = LEFTOVERS.search(OWN_BRACES.sub("-", text))
    return text[max(0, found.start() - 80) : found.end() + 80] if found else ""


def check(answers: Answers, files: dict[str, str]) -> None:
    """Check one project."""
    for path, text in files.items():
        if path.endswith((".gitkeep", ".png")):
            continue
        assert path.endswith(".py") or not leftover(text), (answers, path, leftover(text))
        if path.endswith((".yml", ".yaml")):
            yaml.safe_load(text)
        if path == "README.md":
            assert text.count("\n") <= LONGEST_README, (answers, "move something to a page")
        elif path.startswith("docs/"):
            assert text.count("\n") >= SHORTEST_PAGE, (answers, path, "put it into another page")
    saved = yaml.safe_load(files[".copier-answers.yml"])
    for name, value in answers.items():
        # What was not asked, since it does not matter, is not recorded.
        assert saved.get(name, value) == value, (name, answers)

    assert "/.env" in files[".gitignore"].splitlines(), ("keys could be committed", answers)

    project = tomllib.loads(files["pyproject.toml"])["project"]
    names = {re.match(r"[A-Za-z0-9-]+", each).group() for each in project["dependencies"]}
    assert names == expected_dependencies(answers), answers
    if "description" in answers:
        assert project["description"] == answers["description"]
    if "author_name" in answers:
        assert project["authors"][0]["name"] == answers["author_name"]
    if "project_name" in answers:
        assert files["README.md"].startswith(f"# {answers['project_name']}\n")
    assert yaml.safe_load(files["configs/train.yaml"])["trackers"] == answers.get(
        "trackers", ["tensorboard"]
    )
    tree = Tree.of(answers)
    assert tree in TREES
    assert CONTENT.setdefault(tree, digest_of_tree(answers, files)) == CONTENT[tree], answers


def digest_of_tree(answers: Answers, files: dict[str, str]) -> str:
    """Return a digest of the files that tests/run/test_variants.py runs, one project of a tree."""
    package = complete(answers)["package_name"]
    digest = hashlib.sha256()
    for path, text in files.items():
        if path.startswith(f"src/{package}/"):
            digest.update(f"{path.removeprefix(f'src/{package}')}\n{text}".encode())
        elif path.startswith("configs/"):
            named = re.sub(rf"(?m)\b{package}\b|^run_root: .*$", "-", text)
            digest.update(f"{path}\n{named}".encode())
    return digest.hexdigest()


def lint(
    files: Iterable[tuple[str, str, dict[str, str]]], tool: dict[str, str], folder: Path
) -> None:
    """Run the shell's, shellcheck's, ruff's and Python's checks once over all distinct files.

    A batch script is checked with the functions that it shares with others in its project, without
    the analysis of data flow, which takes most of the time and is in a project's own `make lint`.
    """
    scripts, modules = [], []
    for number, (path, text, sourced) in enumerate(files):
        target = folder / f"{number}" / path
        target.parent.mkdir(parents=True)
        target.write_text(text)
        if path.startswith("slurm/"):
            for name, content in sourced.items():
                (folder / f"{number}" / name).write_text(content)
        (modules if path.endswith(".py") else scripts).append(str(target))
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
    flags = ["--external-sources", "--extended-analysis=false"]
    flags += ["--source-path=SCRIPTDIR/..", "--source-path=SCRIPTDIR/../.."]
    run([tool["shellcheck"], *flags, *scripts])
    config = ["--config", str(Path(__file__).parents[2] / "pyproject.toml")]
    run([tool["ruff"], "check", *config, *modules])
    run([tool["ruff"], "format", "--check", *config, *modules])
    run([sys.executable, "-m", "py_compile", *modules])


def run(command: list[str]) -> None:
    """Run a command, and show what it says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]


@pytest.mark.parametrize("environment", ["venv", "conda"])
def test_a_project_passes_its_own_linter(
    render: Renderer, tool: dict[str, str], tmp_path: Path, environment: str
) -> None:
    """As `make lint` runs it, README and all."""
    answers = {"trackers": ["tensorboard", "wandb", "aim", "mlflow"], "environment": environment}
    for path, text in render({**answers, "sweep": "optuna", "launcher": "torchrun"}).items():
        target = tmp_path / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    for command in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [tool["ruff"], *command, "."], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
