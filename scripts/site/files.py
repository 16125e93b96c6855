"""Tells MkDocs which files are in the site: those of this repository and of rendered projects.

Files keep their paths, so links work as on GitHub.
"""

import tempfile
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import copier
import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# The pages, the files that they link to, and what the browser needs.
SHOWN = (
    "*.md",
    "LICENSE",
    "benchmarks/README.md",
    "benchmarks/results/*.png",
    "docs/*.*",
    "hooks/probe_cluster.py",
    "scripts/site/*.css",
    "scripts/site/*.js",
    "sites/*.yml",
    "tests/README.md",
)
NOTE = """
> In a project, this page depends on your answers. You see here the page of a project called `demo`,
> with all tools, the trackers TensorBoard and W&B, and the default answers to all other questions.
"""


QUESTIONS: dict[str, Any] = yaml.safe_load((ROOT / "copier.yml").read_text("utf-8"))
# All choices of the questions with several answers.
ALL = {
    name: list(QUESTIONS[name]["choices"].values())
    if isinstance(QUESTIONS[name]["choices"], dict)
    else list(QUESTIONS[name]["choices"])
    for name in ("launch_modes", "trackers", "tools")
}
# Pages that show a whole project, by name: the title and the answers.
PROJECTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "default": ("A project with the default answers", {}),
    "everything": ("A project with everything", {**ALL, "container": "apptainer"}),
}
SHOWN_OF_A_PROJECT = ("README.md", "Makefile", "slurm/*.sbatch", "src/demo/train.py")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".sh": "bash", ".md": "markdown"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the theme, those in SHOWN, and pages about rendered projects."""
    paths = (path for pattern in SHOWN for path in sorted(ROOT.glob(pattern)))
    shown = [
        File(
            path.relative_to(ROOT).as_posix(),
            str(ROOT),
            config.site_dir,
            config.use_directory_urls,
        )
        for path in paths
    ]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    rendered = []
    for name, content in {**pages_of_a_project(), **whole_projects()}.items():
        rendered.append(File.generated(config, name, content=content))
    return Files([*theme, *shown, *rendered])


def render(answers: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a project called `demo`, by path."""
    with tempfile.TemporaryDirectory() as folder:
        data = {"package_name": "demo", **answers}
        copier.run_copy(str(ROOT), folder, data, vcs_ref="HEAD", defaults=True, quiet=True)
        paths = (path for path in sorted(Path(folder).rglob("*")) if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def pages_of_a_project() -> dict[str, str | bytes]:
    """Return the pages of a project as in NOTE, which is below their titles."""
    found: dict[str, str | bytes] = {}
    answers = {"tools": ALL["tools"], "trackers": ["tensorboard", "wandb"]}
    for path, content in render(answers).items():
        if path.startswith("docs/"):
            found[f"template/{path}"] = content
            if path.endswith(".md"):
                title, rest = content.decode().split("\n", 1)
                found[f"template/{path}"] = f"{title}\n{NOTE}{rest}"
    return found


def whole_projects() -> dict[str, str]:
    """Return a page about each project: its tree, the owner's files, the scripts and the README."""
    found = {}
    for name, (title, answers) in PROJECTS.items():
        files = render(answers)
        mine = [path for path in files if matches(path, QUESTIONS["_skip_if_exists"])]
        shown = {*mine, *(path for path in files if matches(path, SHOWN_OF_A_PROJECT))}
        lines = [
            f"# {title}\n",
            f"Copier wrote these {len(files)} files. The {len(mine)} that are *yours* start as an "
            "example, and updates leave them alone.\n",
            "```text",
            *(f"{path:48}{'yours' if path in mine else ''}".rstrip() for path in files),
            "```\n",
        ]
        for path in sorted(shown, key=lambda path: (path not in mine, path)):
            text = files[path].decode()
            indented = "".join(f"    {line}" for line in text.splitlines(keepends=True))
            lines += [f'??? note "{path}"\n', f"    ````{LANGUAGES.get(Path(path).suffix, 'text')}"]
            lines += [indented.rstrip("\n"), "    ````\n"]
        found[f"template/{name}.md"] = "\n".join(lines)
    return found


def matches(path: str, patterns: list[str] | tuple[str, ...]) -> bool:
    """Say whether a path fits one of the patterns, each from the folder of the project."""
    return any(fnmatchcase(path, pattern.lstrip("/")) for pattern in patterns)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to pages with Jinja lead to the rendered ones."""
    return markdown.replace(".md.jinja", ".md") if not page.file.generated_by else markdown
