"""All files of a project are in git, whatever the user's own settings of git are."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from classes import Classes
from renderer import Renderer

# A user's rules for all repositories: each of these is on somebody's machine.
RULES = "core\n*.log\ndata\nbuild\nlib\ndocs\nlogs\n*.sh\n.env*\nsrc\n*.yml\n*.txt\ntests/\n"
JUNK = (
    *("src/.DS_Store", "src/demo/.train.py.swp", "src/demo/train.py.orig", "docs/.#slurm.md"),
    *("src/.idea/modules.py", "src/demo/.ipynb_checkpoints/train-checkpoint.py", "notes.txt"),
)
MADE = (
    *(
        "data/MNIST/train.gz",
        "logs/demo-7.out",
        "runs/demo/log.txt",
        "report.html",
        "runs.csv",
        "network.pt2",
        ".venv/bin/a.py",
    ),
    *(".env", "src/demo/__pycache__/train.pyc", "src/demo.egg-info/PKG-INFO", "build/a.py"),
    *("tests/__pycache__/conftest.pyc", "slurm/__pycache__/a.sh"),
)


def git(folder: Path, *arguments: str, given: str = "", ok: Sequence[int] = (0,)) -> str:
    """Run git, with the settings of `folder.gitconfig` and no others; return what it prints."""
    settings = {"GIT_CONFIG_GLOBAL": f"{folder}.gitconfig", "GIT_CONFIG_SYSTEM": os.devnull}
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(
        command, env=os.environ | settings, input=given, capture_output=True, text=True
    )
    assert done.returncode in ok, done.stderr
    return done.stdout


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files to a folder."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """An empty repository of a user who can be given settings in `set_up`."""
    folder = tmp_path / "project"
    (tmp_path / "project.gitconfig").write_text("[user]\n\tname = Test\n\temail = t@example.org\n")
    git(tmp_path, "init", "--quiet", str(folder))
    return folder


def set_up(folder: Path, name: str, value: str) -> None:
    """Give the user a setting for all repositories."""
    git(folder, "config", "--file", f"{folder}.gitconfig", name, value)


def test_no_rule_of_the_user_hides_a_file(classes: Classes, user: Path) -> None:
    """A rule that ignores everything stands for all of them."""
    ignored = user.with_name("ignored")
    ignored.write_text("*\n")
    set_up(user, "core.excludesFile", str(ignored))
    projects = {(v.files[".gitignore"], *sorted(v.files)) for v in classes.variants}
    assert len(projects) > 50
    for rules, *paths in projects:
        (user / ".gitignore").write_text(rules)
        names = "\n".join(paths)
        assert not git(user, "check-ignore", "--stdin", "--no-index", given=names, ok=(0, 1))


def test_the_first_commit_is_complete_and_holds_nothing_else(render: Renderer, user: Path) -> None:
    project = render({"package_name": "demo", "trackers": ["wandb"]})
    ignored = user.with_name("ignored")
    ignored.write_text(f"{RULES}.DS_Store\n.*.swp\n*.orig\n.#*\n.idea/\n.ipynb_checkpoints\n")
    set_up(user, "core.excludesFile", str(ignored))
    write(user, project | dict.fromkeys((*JUNK, *MADE), ""))
    git(user, "add", "--all")
    assert set(git(user, "ls-files").splitlines()) == set(project)


def test_lines_end_as_bash_reads_them(render: Renderer, user: Path) -> None:
    """A clone by somebody whose git makes CRLF of all text."""
    project = render({"package_name": "demo"})
    picture = b"\x89PNG\r\n\x1a\n\0"
    write(user, project)
    (user / "picture.png").write_bytes(picture)
    git(user, "add", "--all")
    git(user, "commit", "--quiet", "--message", "From the template")
    set_up(user, "core.autocrlf", "true")
    clone = user.with_name("clone")
    git(user, "clone", "--quiet", str(user), str(clone))
    assert (clone / "picture.png").read_bytes() == picture
    assert {path: (clone / path).read_bytes().decode() for path in project} == project
