"""`make update` brings a version into a project with every kind of edit, or changes nothing."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from histories import ENVIRONMENT, IDENTITY, commit, contents, git, make_update, render, replace
from renderer import copy_template


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of this template, and a newer version with a change of each kind."""
    folder = copy_template(tmp_path_factory.mktemp("template") / "template")
    for path in (folder / "template/src").rglob("*.py*"):  # few files are faster
        if path.name != "figures.py.jinja":
            path.unlink()
    commit(folder, "A version", tag="v1.0.0")
    scripts = ("submit.sh", "snapshot.sh", "stage.sh.jinja")
    for name in ("README.md.jinja", "scripts/update.sh", *(f"slurm/{name}" for name in scripts)):
        with (folder / "template" / name).open("a") as file:
            file.write("# new\n")
    (folder / "template/logs/.gitkeep").write_text("new\n")
    (folder / "template/docs/new.md").write_text("new\n")
    for name in ("large-data.md", "hooks.md.jinja"):
        (folder / "template/docs" / name).unlink()
    commit(folder, "The next", tag="v1.1.0")
    return folder


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Path:
    """A committed project of the first version."""
    folder = render(template, tmp_path / "project", {"package_name": "demo"}, "v1.0.0")
    commit(folder, "From the template")
    return folder


def test_every_kind_of_edit_is_kept_and_told(project: Path, tmp_path: Path) -> None:
    """A conflict, a deleted file with edits, your own file, flags, ignored files, a link."""
    with (project / "README.md").open("a") as file:
        file.write("# ours\n")
    with (project / "docs/large-data.md").open("a") as file:
        file.write("ours\n")
    (project / "src/demo/figures.py").unlink()
    shutil.rmtree(project / "logs")
    (tmp_path / "scratch").mkdir()
    (project / "logs").symlink_to("../scratch")
    git(project, "rm", "-q", "--cached", "slurm/snapshot.sh")
    with (project / ".gitignore").open("a") as file:
        file.write("/slurm/snapshot.sh\n")
    commit(project, "Ours")
    hidden = {"submit.sh": "--skip-worktree", "stage.sh": "--assume-unchanged", "snapshot.sh": ""}
    for name, flag in hidden.items():
        path = project / "slurm" / name
        path.write_text(f"# ours\n{path.read_text()}")
        if flag:
            git(project, "update-index", flag, f"slurm/{name}")
    before = {name: (project / "slurm" / name).read_text() for name in hidden}
    assert not git(project, "status", "--porcelain")

    done = make_update(project, "--data 'trackers=[tensorboard, mlflow]'")
    assert done.returncode == 0, done.stderr
    lists = re.findall(r"^(\w+).*:\n((?:    \S+\n)+)", done.stdout, re.MULTILINE)
    told = {first: sorted(names.split()) for first, names in lists}
    assert told == {
        "you": ["README.md"],
        "deleted": ["docs/large-data.md"],
        "made": ["src/demo/figures.py"],
        "changed": sorted(f"slurm/{name}" for name in hidden),
    }
    assert "trackers: [tensorboard, mlflow]" in done.stdout, "the file is the owner's"
    status = git(project, "status", "--porcelain").splitlines()
    assert {"UU README.md", "?? docs/new.md", " D docs/large-data.md"} < {*status}
    assert " D docs/hooks.md" in status
    for name, text in before.items():
        now = (project / "slurm" / name).read_text()
        assert "# ours\n" in now and "# new\n" in now
        (saved,) = (project / ".git/before-update").glob(f"*/slurm/{name}")
        assert saved.read_text() == text
    assert os.readlink(project / "logs") == "../scratch" and not any(
        (tmp_path / "scratch").iterdir()
    )
    assert re.search("^_commit: v1.1.0$", (project / ".copier-answers.yml").read_text(), re.M)


def test_a_file_that_git_does_not_look_at_and_that_is_not_copied_stays(project: Path) -> None:
    """It is large, or a link."""
    large, link = project / "slurm/snapshot.sh", project / "slurm/stage.sh"
    for path in (large, link):
        git(project, "update-index", "--skip-worktree", f"slurm/{path.name}")
    large.write_text(text := "# ours\n" * 200_000)
    link.unlink()
    link.symlink_to("../README.md")
    done = make_update(project)
    assert done.returncode == 0, done.stderr
    assert large.read_text() == text and link.is_symlink()
    kept = re.findall(r"^not changed.*:\n((?:    \S+\n)+)", done.stdout, re.MULTILINE)
    assert sorted(kept[0].split()) == ["slurm/snapshot.sh", "slurm/stage.sh"]


@pytest.mark.parametrize("tool", ["uvx", "pipx"])
def test_uvx_and_pipx_serve_without_copier(project: Path, pipx: Path, tool: str) -> None:
    if tool == "uvx":
        (pipx / "pipx").unlink()
        (pipx / "uvx").symlink_to(Path(sys.executable).with_name("uvx"))
    done = make_update(project, PATH=f"{pipx}:/usr/bin:/bin")
    assert "updated to v1.1.0" in done.stdout, done.stderr


def test_an_update_that_is_killed_while_files_move_says_how_to_undo_it(
    project: Path, tmp_path: Path
) -> None:
    before = contents(project)
    (tmp_path / "mv").write_text(
        '#!/bin/bash\n[[ $* != *submit.sh ]] || kill -9 $PPID\nexec /bin/mv "$@"\n'
    )
    (tmp_path / "mv").chmod(0o755)
    assert make_update(project, PATH=f"{tmp_path}:{ENVIRONMENT['PATH']}").returncode
    assert "_commit: v1.0.0" in (project / ".copier-answers.yml").read_text()
    said = make_update(project).stderr
    (undo,) = re.findall("killed; '(.+?)' undoes", said)
    subprocess.run(["bash", "-c", undo], cwd=project, env={**ENVIRONMENT, **IDENTITY}, check=True)
    assert contents(project) == before
    assert make_update(project).returncode == 0


def test_settings_of_git_lose_no_edit(project: Path, tmp_path: Path) -> None:
    settings = "[apply]\nwhitespace=error\n[status]\nshowUntrackedFiles=no\n[color]\nui=always\n"
    (tmp_path / "gitconfig").write_text(settings)
    for name, line in (("README.md", "ours, with a blank \n"), ("slurm/resume.sh", "# ours\n")):
        with (project / name).open("a") as file:
            file.write(line)
    commit(project, "Ours")
    done = make_update(project, GIT_CONFIG_GLOBAL=str(tmp_path / "gitconfig"))
    assert done.returncode == 0, done.stderr
    assert "    README.md\n" in done.stdout
    assert "ours, with a blank" in (project / "README.md").read_text()
    assert "# ours\n" in (project / "slurm/resume.sh").read_text()
    assert not [*project.rglob("*.rej")]


def test_in_a_folder_of_a_larger_repository(template: Path, tmp_path: Path) -> None:
    project = tmp_path / "all/project"
    render(template, project, {"package_name": "demo"}, "v1.0.0")
    (tmp_path / "all/other.txt").write_text("ours\n")
    with (project / "slurm/stage.sh").open("a") as file:
        file.write("# ours\n")
    commit(tmp_path / "all", "Ours")
    # git sets this variable in its hooks.
    done = make_update(project, GIT_DIR=str(tmp_path / "all/.git"))
    assert done.returncode == 0, done.stderr
    assert git(project, "log", "--format=%s") == "Ours\n"
    status = git(project, "status", "--porcelain").splitlines()
    assert {"UU project/slurm/stage.sh", "?? project/docs/new.md"} < {*status}
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message=Settled")
    done = make_update(project)
    assert "nothing has changed" in done.stdout and not git(project, "status", "--porcelain")


@pytest.mark.parametrize("how", ["dirty", "answer", "address", "interrupted", "edited"])
def test_an_update_that_does_not_succeed_changes_nothing(project: Path, how: str) -> None:
    arguments = ""
    if how == "dirty":
        (project / "notes.txt").touch()
    elif how == "answer":
        arguments = "--data time_limit=soon"
    elif how == "address":
        replace(project / ".copier-answers.yml", "_src_path: /", "_src_path: no/such/")
        commit(project, "Moved")
    before, head = contents(project), git(project, "status", "--porcelain")
    if how in ("interrupted", "edited"):
        process = subprocess.Popen(
            ["make", "update"],
            cwd=project,
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        folders = project / ".git"
        while process.poll() is None and not [*folders.glob("update-*/clone/docs/new.md")]:
            time.sleep(0.01)
        if how == "interrupted":
            os.killpg(process.pid, signal.SIGINT)
        else:
            (project / "README.md").write_text("ours\n")
            before, head = contents(project), git(project, "status", "--porcelain")
        said = process.communicate()[1]
        assert not [*folders.glob("update-*")]
    else:
        process = make_update(project, arguments)
        said = process.stderr
    assert process.returncode != 0
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].endswith("nothing has changed")
    assert contents(project) == before and git(project, "status", "--porcelain") == head


def test_an_update_that_cannot_write_says_how_to_undo_it(project: Path, tmp_path: Path) -> None:
    before = contents(project)
    (tmp_path / "mv").write_text('#!/bin/bash\n[[ $* != *submit.sh ]] && exec /bin/mv "$@"\n')
    (tmp_path / "mv").chmod(0o755)
    done = make_update(project, PATH=f"{tmp_path}:{ENVIRONMENT['PATH']}")
    assert done.returncode
    (undo,) = re.findall("'(.+?)' undoes", done.stderr)
    subprocess.run(["bash", "-c", undo], cwd=project, env={**ENVIRONMENT, **IDENTITY}, check=True)
    assert contents(project) == before


def test_a_template_in_a_relative_folder_can_be_found_again(
    template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its path has what YAML quotes, and is longer than a line of YAML."""
    folder = tmp_path / f"the group's #1 {'long ' * 20}folder"
    shutil.copytree(template, folder / "template")
    monkeypatch.chdir(folder)
    project = tmp_path / "project"
    copy = ("-m", "copier", "copy", "--quiet", "--defaults", "--vcs-ref", "v1.0.0", "template")
    subprocess.run([sys.executable, *copy, str(project)], check=True)
    commit(project, "From the template")
    done = make_update(project)
    assert done.returncode == 0, done.stderr
    assert (project / "docs/new.md").exists()
