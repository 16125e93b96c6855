"""`copier update` applies a later template to a project that its owner has edited.

The git histories are real: a repository with two tagged releases of the template, and a project
with its own commits.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import copier
import pytest
import yaml
from histories import IDENTITY, commit, contents, git, render, replace
from renderer import TOOLS, cached, copy_template
from variants import pairwise_variants

ANSWERS = {
    "package_name": "demo",
    "partition": "gpu",
    "modules": "cuda/12.4",
    "tools": [*TOOLS],
}
# Copier's own record, and a file that is full of lines of the same kind.
UNTOUCHED = ("{{ _copier_conf.answers_file }}.jinja", "constraints.txt")
# What is the user's from the first day on.
OWN = (
    *(".editorconfig", ".pre-commit-config.yaml", "AGENTS.md", "CITATION.cff"),
    "configs/train.yaml",
    "slurm/site.sh",
    *(f"src/demo/{name}.py" for name in ("model", "data", "figures", "settings")),
)


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of this template: v1.0.0 is an earlier state, v2.0.0 the present one."""
    folder = copy_template(tmp_path_factory.mktemp("releases") / "template")
    package = folder / "template" / "src" / "{{ package_name }}"
    present = {path: path.read_bytes() for path in folder.rglob("template/**/*") if path.is_file()}

    # The earlier state: another number in a module, no schedule, one more module, and every file
    # ended with another line.
    replace(package / "tools/report/picture.py", "FEW_VALUES = 20", "FEW_VALUES = 15")
    replace(package / "train.py", '"""The training loop', '"""The old training loop')
    (package / "engine/schedule.py").unlink()
    for path in present:
        if path.exists() and path.stat().st_size and path.name not in UNTOUCHED:
            with path.open("a") as file:
                file.write("\n# The end of an earlier version\n")
    (package / "obsolete.py").write_text('"""Gone in the next release."""\n')
    commit(folder, "The earlier state", tag="v1.0.0")

    for path, content in present.items():
        path.write_bytes(content)
    (package / "obsolete.py").unlink()
    commit(folder, "The present state", tag="v2.0.0")
    return folder


def start(releases: Path, folder: Path, answers: Mapping[str, Any]) -> Path:
    """Return a project of the earlier release, committed."""
    render(releases, folder, answers, "v1.0.0")
    commit(folder, "From the template")
    return folder


def expected(
    releases: Path, folder: Path, project: Path, answers: Mapping[str, Any]
) -> dict[str, str]:
    """Return an unedited project after its update: a fresh render, except its own files."""
    fresh = contents(render(releases, folder, answers, "v2.0.0"))
    return fresh | {path: (project / path).read_text() for path in own(project)}


def own(project: Path) -> list[str]:
    """Return the paths of the files that are the user's."""
    package = next(path.parent.name for path in project.glob("src/*/model.py"))
    paths = [path.replace("demo", package) for path in OWN]
    return [path for path in paths if (project / path).exists()]


def update(project: Path, **answers: object) -> dict[str, str]:
    """Bring a project to the present release, as `copier update` does; return its files."""
    with cached():
        copier.run_update(project, data=answers, defaults=True, overwrite=True, quiet=True)
    return contents(project)


@pytest.fixture
def project(releases: Path, tmp_path: Path) -> Path:
    """A project of the earlier release, committed."""
    return start(releases, tmp_path / "project", ANSWERS)


# Each takes seconds: three of four are for the nightly tests.
VARIANTS = [
    pytest.param(answers, id=str(number), marks=[pytest.mark.slow] if number % 4 else [])
    for number, answers in enumerate(pairwise_variants())
]


@pytest.mark.parametrize("answers", VARIANTS)
def test_an_unedited_project_becomes_a_fresh_render(
    releases: Path, tmp_path: Path, answers: Mapping[str, Any]
) -> None:
    project = start(releases, tmp_path / "project", answers)
    assert "# The end of an earlier version" in (project / "README.md").read_text()
    after = expected(releases, tmp_path / "fresh", project, answers)
    assert update(project) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"launch_modes": ["cpu"]}, {"launch_modes": ["cpu", "multi_node"]}),
        ({"launcher": "srun"}, {"launcher": "torchrun"}),
        ({"container": "none"}, {"container": "apptainer"}),
        ({"trackers": []}, {"trackers": ["wandb", "mlflow"], "monitoring_servers": ["mlflow"]}),
        ({"environment": "venv", "sweep": "none"}, {"environment": "conda", "sweep": "optuna"}),
    ],
    ids=["modes", "launcher", "container", "trackers", "environment"],
)
def test_answers_change_and_change_back(
    releases: Path, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    project = start(releases, tmp_path / "project", ANSWERS | before)
    for name, answers in (("there", after), ("back", before)):
        due = expected(releases, tmp_path / name, project, ANSWERS | before | answers)
        assert update(project, **answers) == due
        commit(project, f"Updated {name}")


def test_edits_are_kept(project: Path) -> None:
    """A network, a script's flag and module, a setting, a text; a file deleted and one renamed."""
    package = project / "src" / "demo"
    model = '"""Our network."""\n\nfrom torch import nn\n\n\ndef build() -> nn.Module: ...\n'
    (package / "model.py").write_text(model)
    replace(package / "tools/report/picture.py", '"""Draws the metrics of runs', '"""Our curves')
    (package / "figures.py").unlink()
    script = project / "slurm" / "train_multi_node.sbatch"
    replace(script, "#SBATCH --nodes=2\n", "#SBATCH --nodes=8\n#SBATCH --switches=1\n")
    replace(script, "load_module cuda/12.4\n", "load_module cuda/12.9\nload_module nccl/2.27\n")
    replace(project / "configs" / "train.yaml", "\nepochs: 1\n", "\nepochs: 90\n")
    (project / "slurm" / "site.sh").write_text("export NCCL_SOCKET_IFNAME=ib0\n")
    replace(project / "README.md", "## 2. Train here\n", "Our results.\n\n## 2. Train here\n")
    (package / "mnist.py").unlink()
    cpu = project / "slurm" / "train_cpu.sbatch"
    cpu.rename(cpu.with_name("laptop.sbatch"))
    commit(project, "Our own work")
    edited = contents(project)

    updated = update(project)
    for name in ("src/demo/model.py", "src/demo/data.py", "configs/train.yaml"):
        assert updated[name] == edited[name], "nothing changes in a file that is the user's"
    assert "src/demo/figures.py" in updated, "one that is missing is made again"
    # Their line and ours in the same file.
    assert '"""Our curves' in updated["src/demo/tools/report/picture.py"]
    assert "FEW_VALUES = 20" in updated["src/demo/tools/report/picture.py"]
    assert '"""The training loop' in updated["src/demo/train.py"]
    for name in ("slurm/train_multi_node.sbatch", "README.md"):
        kept = edited[name].replace("# The end of an earlier version", "")
        assert updated[name].rstrip() == kept.rstrip()
    assert updated["slurm/site.sh"] == edited["slurm/site.sh"]
    assert "src/demo/mnist.py" not in updated, "a deleted file stays deleted"
    assert "slurm/train_cpu.sbatch" not in updated, "and a renamed one does not come back"
    assert updated["slurm/laptop.sbatch"] == edited["slurm/laptop.sbatch"]
    assert "src/demo/engine/schedule.py" in updated
    assert "src/demo/obsolete.py" not in updated
    assert yaml.safe_load(updated[".copier-answers.yml"])["_commit"] == "v2.0.0"
    assert not [
        name for name, text in updated.items() if "\n<<<<<<< " in text or name.endswith(".rej")
    ]


def test_new_lines_for_a_site_are_told_once(releases: Path, tmp_path: Path) -> None:
    """The file is the user's: Copier prints what the preset of the site has now."""
    first, second = "export A=1\nexport B=2", 'if [[ $A == "1" ]]; then\n    export C=3\nfi'
    project = start(releases, tmp_path / "project", ANSWERS | {"site_script": first})
    site = project / "slurm/site.sh"
    text = site.read_text()
    assert f"\n{first}\n" in text

    def told(*data: str) -> str:
        if git(project, "status", "--short"):
            commit(project, "Ours")
        command = (sys.executable, "-m", "copier", "update", "--defaults", *data)
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert site.read_text() == text and not git(project, "status", "--short", "slurm/site.sh")
        return done.stderr.partition("slurm/site.sh is yours")[2]

    assert told() == ""
    site.write_text(text := f"{text}export MINE=1\n")
    said = told(f"--data=site_script={second}")
    assert '    if [[ $A == "1" ]]; then\n        export C=3\n    fi\n' in said
    assert told(f"--data=site_script={second}") == ""
    assert told("--data=site_script=") == ""
    recorded = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert "former_site_script" not in recorded


def test_a_file_for_a_site_that_the_update_makes_has_the_new_lines(
    releases: Path, tmp_path: Path
) -> None:
    """As in a project that is older than the file."""
    project = start(releases, tmp_path / "project", ANSWERS)
    (project / "slurm/site.sh").unlink()
    commit(project, "As before")
    done = copier_says(project, "update", "--data", "site_script=export A=1")
    assert done.returncode == 0 and "slurm/site.sh is yours" not in done.stderr
    assert "\nexport A=1\n" in (project / "slurm/site.sh").read_text()


def test_files_for_other_tools_that_were_there_first_are_kept(
    releases: Path, tmp_path: Path
) -> None:
    """The template may have got them after the project did."""
    named = {"author_name": "Ada", "pre_commit": True}
    project = start(releases, tmp_path / "project", ANSWERS | named)
    tools = [path for path in OWN if "/" not in path]
    assert set(tools) < set(contents(project))
    for name in tools:
        (project / name).write_text("ours: true\n")
    commit(project, "Our own")
    after = update(project)
    assert {after[name] for name in tools} == {"ours: true\n"}
    assert not git(project, "status", "--short", *tools)


def test_both_sides_changed_a_line_and_git_shows_it(project: Path) -> None:
    replace(project / "src/demo/tools/report/picture.py", "FEW_VALUES = 15", "FEW_VALUES = 7")
    commit(project, "Our own number")
    text = update(project)["src/demo/tools/report/picture.py"]
    assert "<<<<<<<" in text and "FEW_VALUES = 7" in text and "FEW_VALUES = 20" in text
    assert "UU src/demo/tools/report/picture.py" in git(project, "status", "--porcelain")


def test_where_git_writes_crlf_the_same_files_change(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gitconfig").write_text("[core]\n\tautocrlf = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", str(project), str(clone))
    assert copier_says(clone, "update").returncode == 0
    update(project)
    assert git(clone, "status", "--porcelain") == git(project, "status", "--porcelain")
    files = [path for path in clone.rglob("*") if path.is_file() and ".git" not in path.parts]
    picture = clone / "docs/report.png"
    assert picture.read_bytes() == (project / "docs/report.png").read_bytes()
    files.remove(picture)
    assert len(files) > 80 and not [path for path in files if b"\r" in path.read_bytes()]


def copier_says(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `copier` as a user does."""
    command = [sys.executable, "-m", "copier", *arguments, "--defaults"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True)


def test_another_package_name_or_example_is_refused(project: Path) -> None:
    before = contents(project)
    for answers in ({"package_name": "other"}, ANSWERS | {"package_name": "other"}):
        with pytest.raises(ValueError, match=r"package_name.*must stay demo: .*docs/updating.md"):
            update(project, **answers)
    with pytest.raises(ValueError, match=r"example.*must stay digits: .*docs/updating.md"):
        update(project, example="text")
    assert contents(project) == before and not git(project, "status", "--porcelain")
    # Another title is no other package.
    assert "# Other" in update(project, project_name="Other")["README.md"]


def test_what_is_said_after_an_update(project: Path) -> None:
    obsolete = "src/demo/obsolete.py"
    (project / obsolete).write_text("ours = True\n")
    commit(project, "Our own work")
    done = copier_says(project, "update", "--data", "trackers=[mlflow]")
    assert done.returncode == 0 and "Warning" not in done.stderr
    # It names no file, but has the commands that do.
    ignored, deleted = re.findall(r"^ +git (.*)", done.stderr, re.MULTILINE)
    assert obsolete in git(project, *shlex.split(deleted)).split()
    mine = ["container/mine.py", "mine.py", "src/demo/mine.py"]
    for name in (*mine, "container/env/mine.py", "src/demo/__pycache__/mine.pyc"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).touch()
    with (project / ".gitignore").open("a") as file:
        file.write("mine.py\n")
    assert git(project, *shlex.split(ignored)).splitlines() == mine
    # What the settings do not follow by themselves.
    assert "    trackers: [mlflow]\n" in done.stderr
    replace(project / "configs/train.yaml", "trackers: [tensorboard]", "trackers: [mlflow]")
    commit(project, "Updated")
    done = copier_says(project, "update")
    assert "project was up" in done.stderr
    assert "trackers" not in done.stderr
    assert not git(project, "status", "--porcelain")


def test_an_update_that_is_interrupted_is_undone_as_it_says(project: Path) -> None:
    replace(project / "src/demo/train.py", '"""The old training', '"""Our training')
    commit(project, "Our own work")
    before = contents(project)
    command = [sys.executable, "-m", "copier", "update", "--defaults"]
    process = subprocess.Popen(command, cwd=project, stderr=subprocess.PIPE, text=True)
    new = project / "src/demo/engine/schedule.py"
    while process.poll() is None and not new.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 1 and git(project, "status", "--porcelain")
    (undo,) = re.findall("files: run `(.+?)`", said)
    environment = {**os.environ, **IDENTITY}
    subprocess.run(["bash", "-c", undo], cwd=project, env=environment, check=True)
    assert contents(project) == before and not git(project, "status", "--porcelain")
    assert copier_says(project, "update").returncode == 0
    assert new.exists() and '"""Our training' in (project / "src/demo/train.py").read_text()


def test_recopy_keeps_what_is_the_users_and_nothing_else(project: Path) -> None:
    for name in ("README.md", *OWN):
        (project / name).write_text("ours: true\n")
    copier.run_recopy(project, defaults=True, overwrite=True, quiet=True)
    after = contents(project)
    assert [name for name in ("README.md", *OWN) if after[name] == "ours: true\n"] == list(OWN)


def test_a_copy_warns_of_nothing(releases: Path, tmp_path: Path) -> None:
    """Copier would, if the questions asked for the answers of a project that is not there."""
    done = copier_says(tmp_path, "copy", str(releases), "fresh")
    assert done.returncode == 0 and "Warning" not in done.stderr
