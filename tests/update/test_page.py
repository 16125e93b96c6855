"""The commands in the page about updates work in a project that has a newer version to get."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import yaml
from histories import IDENTITY, commit, git, render, replace
from renderer import TEMPLATE, copy_template

MAKES = ("make setup test",)  # it installs packages: in tests/run/test_setup.py
ADDRESS = "https://git.example.org/new/address.git"  # of a template that moved


@pytest.mark.shows("git *", "make update*", "sed -i *")
def test_the_commands_of_the_page_on_updates(tmp_path: Path) -> None:
    template = copy_template(tmp_path / "template")
    for path in (template / "template/src").rglob("*.py"):  # few files are faster
        if path.name != "model.py":
            path.unlink()
    commit(template, "A version", tag="v1.3.0")
    project = render(template, tmp_path / "project", {"package_name": "demo"}, "v1.3.0")
    commit(project, "From the template")
    moved = template.with_name("moved")
    replace(template / "template/LICENSE.jinja", "MIT License", "The MIT License")
    commit(template, "The next", tag="v1.4.0")

    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    text = (TEMPLATE / "docs/updating.md").read_text("utf-8")
    typed = [command.line for command in pages.commands(text)]
    inline = re.findall(r"`((?:git|bash|make update) [^`]+)`", text)
    assert len(typed) > 6 and len(inline) > 3
    said: dict[str, str] = {}
    for line in (*typed, *inline):
        if line in MAKES:
            continue
        if line == "git add --all":
            (project / "notes.txt").write_text(f"{len(said)}\n")
        elif line.startswith(("make update", "git add --all &&")):
            git(project, "add", "--all")
            git(project, "commit", "--quiet", "--allow-empty", "--message=Before it")
        shown = line.replace("FILE", "README.md").replace(ADDRESS, str(moved))
        if str(moved) in shown:
            template.rename(moved)
        done = subprocess.run(
            ["bash", "-c", shown],
            cwd=project,
            env={**os.environ, **IDENTITY, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        differs = done.returncode == 1 and "--no-index" in line and done.stdout
        assert done.returncode == 0 or differs, (line, done.stdout, done.stderr)
        said[line] = said.get(line, "") + done.stdout + done.stderr
    assert "updated to v1.4.0" in said["make update"]
    assert "+The MIT License" in said["git diff"]
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text("utf-8"))
    assert (answers["partition"], answers["trackers"]) == ("gpu_long", ["tensorboard", "mlflow"])
    assert (answers["package_name"], answers["_src_path"]) == ("digits", str(moved))
    assert (project / "src/digits/model.py").exists() and not (project / "src/demo").exists()
    assert "python -m digits" in (project / "README.md").read_text("utf-8")
