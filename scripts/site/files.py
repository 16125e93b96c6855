"""Tells MkDocs which files are in the site: those of this repository, and the pages of a project.

Files keep their paths, so links work as on GitHub.
"""

import tempfile
from pathlib import Path

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
> with all launch modes and tools, srun and venv, and the default answers to all other questions.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the theme, those in SHOWN, and the rendered pages of template/docs/."""
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
    with tempfile.TemporaryDirectory() as folder:
        questions = yaml.safe_load((ROOT / "copier.yml").read_text("utf-8"))
        tools = list(questions["tools"]["choices"].values())
        answers = {"package_name": "demo", "tools": tools}
        copier.run_copy(str(ROOT), folder, answers, vcs_ref="HEAD", defaults=True, quiet=True)
        rendered = []
        for path in sorted(Path(folder).glob("docs/*.*")):
            content: str | bytes = path.read_bytes()
            if path.suffix == ".md":
                title, rest = path.read_text("utf-8").split("\n", 1)
                content = f"{title}\n{NOTE}{rest}"
            name = f"template/docs/{path.name}"
            rendered.append(File.generated(config, name, content=content))
    return Files([*theme, *shown, *rendered])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to pages with Jinja lead to the rendered ones."""
    return markdown.replace(".md.jinja", ".md") if not page.file.generated_by else markdown
