"""The page of questions, made of copier.yml and of what is rendered for different answers."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from renderer import QUESTIONS, TEMPLATE, Renderer
from variants import SAMPLES

HEAD = """\
# Choosing answers

All questions of the template, in their order. `setup: quick` asks those in bold, `full` asks all;
what is not asked gets its default. A question is asked only where an earlier answer makes it
matter. Any of them can be given by `--data NAME=VALUE`, or in a file by `--data-file`. Answers in
Copier's settings replace the defaults, and `quick` does not ask these questions
([for support teams](for-support-teams.md)).

Answers are changed later by `copier update --data NAME=VALUE`, never by hand in
`.copier-answers.yml`. A file that the new answers have no use for is then deleted, **with the edits
that you made in it**: commit first, and look at `git diff`.

*Decides* names the files that an answer brings, and behind "changes" those that read otherwise.
This page is made of `copier.yml` and of real renders; `CONTRIBUTING.md` says how.
"""
TABLE = "| question | meaning | default | decides |\n|---|---|---|---|\n"
# The condition of the questions that `quick` does not ask.
FULL = "{{ setup == 'full' }}"
# Answers under which a question is asked, and matters.
CONTEXT: dict[str, dict[str, Any]] = {
    "description": {"author_name": "Ada"},
    "author_email": {"author_name": "Ada"},
    "license": {"author_name": "Ada"},
    "memory_scope": {"memory": "64G"},
    "mail_type": {"mail_user": "ada@example.org"},
    "module_purge": {"modules": "python/3.12"},
    "container_image": {"container": "apptainer"},
    "container_base_image": {"container": "apptainer"},
    "monitoring_servers": {"trackers": ["tensorboard", "aim", "mlflow", "trackio"]},
}
# Defaults that follow from another answer than the project's name.
DEFAULTS = {
    "tools": "all of them",
    "project_name": "`MNIST DDP`, with `--defaults`",
    "signal_lead_seconds": "`120`; half of a `time_limit` below 4 minutes",
}
# Values that show more than the samples of the tests do.
VALUES = {
    "trackers": [[], ["tensorboard"], ["wandb"], ["aim"], ["mlflow"], ["trackio"]],
    "monitoring_servers": [[], ["tensorboard"], ["aim"], ["mlflow"], ["trackio"]],
    "launch_modes": [["cpu"], ["single_node"], ["multi_node"]],
    "container": ["none", "apptainer"],
    "container_image": ["", "/images/torch.sif"],
    "container_base_image": ["python:3.12-slim", "python:3.13-slim"],
}


def page(render: Renderer) -> str:
    """Return the page, in Markdown."""
    parts = [HEAD]
    for line in (TEMPLATE / "copier.yml").read_text("utf-8").splitlines():
        if group := re.fullmatch(r"# ([A-Z][a-z]+)", line):
            parts.append(f"\n## {group[1]}\n\n{TABLE}")
        name = line.removesuffix(":")
        question = QUESTIONS.get(name)
        if question and question.get("when") is not False and name != "setup":
            parts.append(row(name, question, render))
    return "".join(parts)


def row(name: str, question: Mapping[str, Any], render: Renderer) -> str:
    """Return a question's line of the table."""
    meaning = " ".join(re.sub(r"\{\{.*?'(GPU nodes)'.*?\}\}", r"\1", question["help"]).split())
    if choices := question.get("choices"):
        values = (
            choices
            if isinstance(choices, list)
            else [
                value["value"] if isinstance(value, dict) else value for value in choices.values()
            ]
        )
        words = (value if isinstance(value, str) else json.dumps(value) for value in values)
        meaning += f" ({', '.join(words)})"
    title = name if question.get("ask") == FULL else f"**{name}**"
    usual = DEFAULTS.get(name) or default(question["default"])
    cells = (title, meaning, usual, decides(name, render))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def default(value: object) -> str:
    """Return a default as a reader understands it."""
    if isinstance(value, str) and "{" in value:
        return "made of the project's name"
    if value in ("", []):
        return "empty" if value == "" else "none"
    if isinstance(value, list):
        return ", ".join(value)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def decides(name: str, render: Renderer) -> str:
    """Return which files an answer brings or changes."""
    base = {"setup": "full", "package_name": "demo", **CONTEXT.get(name, {})}
    values = VALUES.get(name, SAMPLES[name])
    renders = [render({**base, name: value}) for value in values]
    if name == "package_name":
        return "the package's folder, and its name everywhere"
    everywhere = set.intersection(*(set(files) for files in renders)) - {".copier-answers.yml"}
    anywhere = set.union(*(set(files) for files in renders))
    comes = anywhere - everywhere - {".copier-answers.yml"}
    changes = {path for path in everywhere if len({files[path] for files in renders}) > 1}
    said = [short(comes), f"changes {short(changes)}" if changes else ""]
    return "; ".join(filter(None, said)) or "what is asked"


def short(paths: Iterable[str]) -> str:
    """Return a list of paths in which a folder stands for many of its files."""
    folders: dict[str, list[str]] = {}
    for path in sorted(paths):
        shown = path.replace("src/demo/", "src/<package>/")
        folders.setdefault(str(PurePosixPath(shown).parent), []).append(shown)
    names = []
    for folder, files in folders.items():
        if len(files) < 4 or folder == ".":
            names += files
        else:
            endings = {PurePosixPath(path).suffix for path in files}
            names.append(f"{folder}/*{endings.pop() if len(endings) == 1 else ''}")
    return ", ".join(f"`{name}`" for name in names)
