"""The commands of the page on updates, typed in a project that has a newer version before it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pages
import yaml
from histories import commit, git, render, replace
from renderer import TEMPLATE, copy_template

MAKES = ("make setup test",)  # it installs packages: in tests/run/test_setup.py
IDENTITY = {"GIT_AUTHOR_NAME": "Test", "GIT_COMMITTER_NAME": "Test", "EMAIL": "test@example.org"}


def test_the_commands_of_the_page_on_updates(tmp_path: Path) -> None:
    template = copy_template(tmp_path / "template")
    shutil.rmtree(template / "template/src")  # the page is about other files; it is faster so
    commit(template, "A version", tag="v1.3.0")
    project = render(template, tmp_path / "project", {"package_name": "demo"}, "v1.3.0")
    commit(project, "From the template")
    replace(template / "template/LICENSE.jinja", "MIT License", "The MIT License")
    commit(template, "The next", tag="v1.4.0")

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    text = (TEMPLATE / "docs/updating.md").read_text("utf-8")
    typed = [command.line for command in pages.commands(text)]
    inline = re.findall(r"`((?:copier|git) [^`]+)`", text)
    assert len(typed) > 6 and len(inline) > 3
    said = {}
    for line in (*typed, *inline):
        if line in MAKES:
            continue
        if line.startswith(("copier update", "git reset")):
            git(project, "add", "--all")
            git(project, "commit", "--quiet", "--allow-empty", "--message=Before it")
        # Nobody is here to answer.
        shown = re.sub(r"^copier update(?! --defaults)", "copier update --defaults", line)
        shown = shown.replace("FILE", "README.md")
        done = subprocess.run(
            ["bash", "-c", shown],
            cwd=project,
            env={**os.environ, **IDENTITY, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        said[line] = done.stdout + done.stderr
    assert "1.4.0" in said["copier check-update"]
    assert "+The MIT License" in said["git diff"]
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text("utf-8"))
    assert (answers["partition"], answers["trackers"]) == ("gpu_long", ["tensorboard", "mlflow"])
