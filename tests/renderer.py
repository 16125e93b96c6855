"""Renders the template in this process, several times as fast as `copier copy`.

For each of hundreds of variants, Copier would read the questions again, compile each Jinja source
again, render a folder's name for each file in it, and ask git about file modes in a destination
that is not a repository. Here, each of these is done once. `tests/render/test_copier.py` checks
that the result is the same.
"""

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

import copier
import copier._main
import copier._template
import jinja2
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "QUESTIONNAIRE",
    "QUESTIONS",
    "TEMPLATE",
    "Renderer",
    "cached",
    "copy_template",
    "read",
    "shrink",
    "tomllib",
]

TEMPLATE = Path(__file__).parents[1]
QUESTIONNAIRE: dict[str, Any] = yaml.safe_load((TEMPLATE / "copier.yml").read_text("utf-8"))
QUESTIONS: dict[str, Any] = {
    name: question for name, question in QUESTIONNAIRE.items() if not name.startswith("_")
}
TOOLS: Sequence[str] = tuple(QUESTIONS["tools"]["choices"].values())
# On a memory disk, if there is one.
SCRATCH = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())


def copy_template(folder: Path) -> Path:
    """Copy the template from the working tree, without its history."""
    folder.mkdir(parents=True)
    shutil.copy(TEMPLATE / "copier.yml", folder)
    for name in ("examples", "hooks", "template"):
        ignored = shutil.ignore_patterns("__pycache__", ".ruff_cache")
        shutil.copytree(TEMPLATE / name, folder / name, ignore=ignored)
    return folder


def render_project(folder: Path, tools: Sequence[str] | None = TOOLS, **answers: object) -> Path:
    """Render the template of the working tree to a folder; return the folder.

    Args:
        tools: the answer; None for the default one, which leaves most of them out.
    """
    data = {"package_name": "demo", **answers, **({} if tools is None else {"tools": [*tools]})}
    with cached():
        copier.run_copy(str(TEMPLATE), folder, data=data, defaults=True, vcs_ref="HEAD", quiet=True)
    return folder


PAUSE = '        time.sleep(float(os.environ.get("STEP_SECONDS", 0.01)))\n'


def shrink(project: Path) -> Path:
    """Give the example `digits` a network with a seventh of the work; return the project.

    It is for all tests that do not check the learning: they took most of their time for the
    network, and for figures, which show one sample of one class here. A pause keeps a step as long
    as before, so that a test can stop the training. Batch size and learning rate are fixed, so
    that tests can count on steps if the defaults change.
    """
    edits = {
        "model.py": (
            ("convolution(4, 24,", "convolution(4, 8,"),
            ("convolution(24, 48,", "convolution(8, 16,"),
            ("convolution(48, 64)", "convolution(16, 16)"),
            ("64 * 3 * 3", "16 * 3 * 3"),
            (
                "        images, labels = batch\n        return F",
                f"{PAUSE}        images, labels = batch\n        return F",
            ),
            ("from collections.abc", "import os\nimport time\nfrom collections.abc"),
        ),
        "figures.py": (
            ("range(len(counts))", "range(1)"),
            ("inputs[:16]", "inputs[:1]"),
        ),
    }
    (package,) = project.glob("src/*")
    for name, pairs in edits.items():
        text = (package / name).read_text()
        for old, new in pairs:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (package / name).write_text(text)
    config = project / "configs/train.yaml"
    settings = re.sub("(?m)^batch_size: .*", "batch_size: 64", config.read_text())
    config.write_text(re.sub("(?m)^lr: .*", "lr: 0.15", settings))
    return project


class Renderer:
    """Renders answers to the contents of files.

    Args:
        template: a folder from `copy_template`.
    """

    def __init__(self, template: Path) -> None:
        self.template = template

    def __call__(self, answers: Mapping[str, Any]) -> dict[str, str]:
        """Return the files of the project for some answers, by path.

        Raises:
            KeyError: there is no question for an answer. Copier would ignore such an answer.
            ValueError: a validator refuses an answer.
        """
        if unknown := set(answers) - set(QUESTIONS):
            raise KeyError(f"no such question: {sorted(unknown)}")
        # The template is a plain folder. To learn that, Copier would make a repository.
        no_git = mock.patch.object(copier._template, "is_git_available", lambda: False)
        with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch, cached(), no_git:
            project = Path(scratch) / "project"
            copier.run_copy(
                str(self.template), project, data=dict(answers), defaults=True, quiet=True
            )
            return read(project)


def read(project: Path) -> dict[str, str]:
    """Return the files of a project by path, without git's own files. A picture has no text."""
    return {
        str(path.relative_to(project)): "" if path.suffix == ".png" else path.read_text("utf-8")
        for path in sorted(project.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(project).parts
    }


_compile = jinja2.Environment.compile
_compiled: dict[tuple, CodeType] = {}
_render_template = copier._main.Worker._render_template
_render_string = copier._main.Worker._render_string
_load_template_config = copier._template.load_template_config
_configs: dict[str, dict[str, Any]] = {}


def _compile_once(
    self: jinja2.Environment,
    source: Any,  # noqa: ANN401
    name: str | None = None,
    filename: str | None = None,
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    # Not by the file: each render of the working tree is from another clone of it.
    key = (source, name, *sorted(options.items()))
    if not isinstance(source, str):
        return _compile(self, source, name, filename, **options)
    if key not in _compiled:
        _compiled[key] = _compile(self, source, name, filename, **options)
    return _compiled[key]


def _load_once(path: Path, quiet: bool = False) -> dict[str, Any]:
    text = path.read_text("utf-8")
    if text not in _configs:
        _configs[text] = _load_template_config(path, quiet)
    return deepcopy(_configs[text])


def _render_names_once(self: copier._main.Worker) -> None:
    """Render the files; render each folder name, with which many paths begin, only once.

    The answers, which Copier would gather again for each file, no longer change.
    """
    known: dict[str, str] = {}
    context = self._render_context()

    def render(self: copier._main.Worker, text: str, extra_context: Any = None) -> str:  # noqa: ANN401
        if "{" not in text:
            return text
        if extra_context or text not in known:
            known[text] = _render_string(self, text, extra_context)
        return known[text]

    with (
        mock.patch.object(copier._main.Worker, "_render_string", render),
        mock.patch.object(copier._main.Worker, "answers_relpath", self.answers_relpath),
        mock.patch.object(copier._main.Worker, "_render_context", lambda _: dict(context)),
    ):
        _render_template(self)


@contextmanager
def cached() -> Iterator[None]:
    """Let Copier compile, render and read only what has changed.

    It asks git about the mode of each file, which matters only where git does not see modes.
    """
    with (
        mock.patch.object(copier._main, "is_git_available", lambda: False),
        mock.patch.object(jinja2.Environment, "compile", _compile_once),
        mock.patch.object(copier._main.Worker, "_render_template", _render_names_once),
        mock.patch.object(copier._template, "load_template_config", _load_once),
    ):
        yield
