"""Makes the page of questions from copier.yml and from the files that answers render."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from renderer import QUESTIONS, TEMPLATE, Renderer
from variants import SAMPLES, SERVERS, TRACKERS

HEAD = """\
# Choosing answers

These are all questions of the template, in the order in which Copier asks them.

- With `setup: quick`, Copier asks the questions in **bold**. With `setup: full`, it asks all
  questions, except those in *italics*: only data files, `--data` and settings answer these. If
  Copier does not ask a question, the answer is the default.
- Some questions depend on an earlier answer. For example, Copier asks for `memory_scope` only if
  `memory` has an answer.
- To give an answer in advance, use `--data NAME=VALUE`, or a YAML file with `--data-file FILE`.
- Your site may have set answers in [Copier's settings](for-support-teams.md). They replace the
  defaults. With `setup: quick`, Copier does not ask these questions.

To change an answer later, run `make update ARGS="--data NAME=VALUE"` in the project. Never
edit `.copier-answers.yml` by hand. The update deletes the files that the new answers do not need,
**and your edits in them**. So commit first, and look at `git diff` afterwards
([Updates](updating.md) explains this).

The column *files* first lists the files that a project has only with some of the answers. After the
word "changes", it lists the files whose content depends on the answer.

`tests/render/questions.py` makes this page from `copier.yml` and from rendered projects.
"""
TABLE = "| question | meaning | default | files |\n|---|---|---|---|\n"
# The condition of the questions that `quick` does not ask.
FULL = "{{ setup == 'full' }}"
# Answers with which a question is asked, and has an effect.
CONTEXT: dict[str, dict[str, Any]] = {
    "description": {"author_name": "Ada"},
    "author_email": {"author_name": "Ada"},
    "license": {"author_name": "Ada"},
    "memory_scope": {"memory": "64G"},
    "mail_type": {"mail_user": "ada@example.org"},
    "module_purge": {"modules": "python/3.12"},
    "container_image": {"container": "apptainer"},
    "container_base_image": {"container": "apptainer"},
    "monitoring_servers": {"trackers": list(SERVERS)},
}
# Defaults that depend on another answer than the project's name, or need other words.
DEFAULTS = {
    "tools": "`doctor`, `evaluate`, `predict`, `usage`; with several nodes `check_comm`, too",
    "author_name": "the project's name and `contributors`",
    "project_name": "`MNIST DDP`, with `--defaults`",
    "signal_lead_seconds": "`120`; half of a `time_limit` below 4 minutes",
}
# Values that show more files than the samples of the tests.
VALUES = {
    "trackers": [[], *([name] for name in TRACKERS)],
    "monitoring_servers": [[], *([name] for name in SERVERS)],
    "launch_modes": [["cpu"], ["single_node"], ["multi_node"]],
    "container": ["none", "apptainer"],
    "container_image": ["", "/images/torch.sif"],
    "container_base_image": ["python:3.12-slim", "python:3.13-slim"],
}


def page(render: Renderer) -> str:
    """Return the page as Markdown."""
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
    """Return the row of a question in the table."""
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
    title = {FULL: name, False: f"*{name}*"}.get(question.get("ask"), f"**{name}**")
    usual = DEFAULTS.get(name) or default(question["default"])
    cells = (title, meaning, usual, decides(name, render))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def default(value: object) -> str:
    """Return a default in words for a reader."""
    if isinstance(value, str) and "{" in value:
        return "derived from the project's name"
    if value in ("", []):
        return "empty" if value == "" else "none"
    if isinstance(value, list):
        return ", ".join(value)
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def decides(name: str, render: Renderer) -> str:
    """Return which files exist or change with an answer."""
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
    """Return a list of paths, with the folder instead of its files if these are many."""
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
