"""Git histories for the tests of updates: releases of the template, and projects with commits."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import copier
from renderer import cached

# Environment variables with the author that git needs for a commit.
IDENTITY = {"GIT_AUTHOR_NAME": "Test", "GIT_COMMITTER_NAME": "Test", "EMAIL": "test@example.org"}

# Where `make update` finds Copier.
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return what it prints."""
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout


def commit(folder: Path, message: str, tag: str = "") -> None:
    """Commit all files in a folder, with a tag if one is given; make a repository if needed."""
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)
    if tag:
        git(folder, "tag", tag)


def replace(path: Path, old: str, new: str) -> None:
    """Replace a text that occurs once in a file."""
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path}"
    path.write_text(text.replace(old, new))


def render(template: Path, folder: Path, answers: Mapping[str, Any], release: str) -> Path:
    """Render a release to a folder; return the folder."""
    with cached():
        copier.run_copy(
            str(template), folder, data=dict(answers), defaults=True, vcs_ref=release, quiet=True
        )
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Return all files of a project by path, except those of git and Python."""
    return {
        str(path.relative_to(folder)): "" if path.suffix == ".png" else path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not {".git", "__pycache__"} & {*path.relative_to(folder).parts}
    }


def make_update(
    folder: Path, arguments: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `make update` without a terminal."""
    return subprocess.run(
        ["make", "update", f"ARGS={arguments}"],
        cwd=folder,
        env={**ENVIRONMENT, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
