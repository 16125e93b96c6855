"""Tells MkDocs which files are in the site. They keep their paths, so links work as on GitHub."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

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
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the files of the theme and those in SHOWN, by their paths in this repository."""
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
    return Files([*theme, *shown])
