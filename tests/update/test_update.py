"""`copier update` brings a later template into a project that its owner has edited.

The histories are real: a repository with two tagged releases of the template, and a project with
commits of its own.
"""

import shutil
import subprocess
from pathlib import Path

import copier
import pytest
import yaml

TEMPLATE = Path(__file__).parents[2]


def git(folder: Path, *arguments: str) -> str:
    """Run git in a folder and return what it prints."""
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout


def commit(folder: Path, message: str) -> None:
    """Commit everything in a folder."""
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", message)


def replace(path: Path, old: str, new: str) -> None:
    """Replace a text that occurs once in a file."""
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times in {path}"
    path.write_text(text.replace(old, new))


@pytest.fixture
def releases(tmp_path: Path) -> Path:
    """A repository of this template: v1.0.0 is an earlier state, v2.0.0 the present one."""
    folder = tmp_path / "template"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    for name in ("copier.yml", "hooks", "template"):
        source = TEMPLATE / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    package = folder / "template" / "src" / "{{ package_name }}"
    # The earlier state: a test set of another size, no schedule, one more module.
    present = {path: path.read_text() for path in (package / "data.py", package / "train.py")}
    replace(package / "data.py", "synthesize(4_001, seed=2)", "synthesize(3_000, seed=2)")
    replace(package / "train.py", '"""The training loop."""', '"""The old loop."""')
    (package / "obsolete.py").write_text('"""Gone in the next release."""\n')
    schedule = (package / "schedule.py").read_text()
    (package / "schedule.py").unlink()
    commit(folder, "The earlier state")
    git(folder, "tag", "v1.0.0")

    for path, text in present.items():
        path.write_text(text)
    (package / "schedule.py").write_text(schedule)
    (package / "obsolete.py").unlink()
    commit(folder, "The present state")
    git(folder, "tag", "v2.0.0")
    return folder


@pytest.fixture
def project(releases: Path, tmp_path: Path) -> Path:
    """A project of the earlier release, committed."""
    folder = tmp_path / "project"
    copier.run_copy(
        str(releases), folder, data=ANSWERS, defaults=True, vcs_ref="v1.0.0", quiet=True
    )
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, "From the template")
    return folder


ANSWERS = {"package_name": "demo", "partition": "gpu"}


def contents(folder: Path) -> dict[str, str]:
    """Return all files of a project but git's, by path."""
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(folder).parts
    }


def test_an_unedited_project_becomes_a_fresh_render(
    releases: Path, project: Path, tmp_path: Path
) -> None:
    copier.run_update(project, defaults=True, overwrite=True, quiet=True)
    fresh = tmp_path / "fresh"
    copier.run_copy(str(releases), fresh, data=ANSWERS, defaults=True, quiet=True)
    assert contents(project) == contents(fresh)
    assert not (project / "src" / "demo" / "obsolete.py").exists()


def test_edits_are_kept(releases: Path, project: Path) -> None:
    """A network of their own, a flag in a batch script, a setting, a text, a file and one less."""
    package = project / "src" / "demo"
    model = '"""Our network."""\n\nfrom torch import nn\n\n\ndef build() -> nn.Module: ...\n'
    (package / "model.py").write_text(model)
    replace(package / "data.py", "MEAN, DEVIATION = 33.3, 78.6", "MEAN, DEVIATION = 0.0, 255.0")
    script = project / "slurm" / "train_multi_node.sbatch"
    replace(script, "#SBATCH --nodes=2\n", "#SBATCH --nodes=8\n#SBATCH --switches=1\n")
    replace(project / "configs" / "train.yaml", "epochs: 1\n", "epochs: 90\n")
    (project / "slurm" / "site.sh").write_text("export NCCL_SOCKET_IFNAME=ib0\n")
    (project / "README.md").write_text((project / "README.md").read_text() + "\nOur results.\n")
    (package / "mnist.py").unlink()
    commit(project, "Our own work")
    edited = contents(project)

    copier.run_update(project, defaults=True, overwrite=True, quiet=True)

    updated = contents(project)
    assert (package / "model.py").read_text() == model
    # Their line and ours in the same file.
    assert "MEAN, DEVIATION = 0.0, 255.0" in updated["src/demo/data.py"]
    assert "synthesize(4_001, seed=2)" in updated["src/demo/data.py"]
    assert '"""The training loop."""' in updated["src/demo/train.py"]
    for name in ("slurm/train_multi_node.sbatch", "configs/train.yaml", "slurm/site.sh"):
        assert updated[name] == edited[name]
    assert updated["README.md"].endswith("\nOur results.\n")
    assert "src/demo/mnist.py" not in updated, "a deleted file stays deleted"
    assert "src/demo/schedule.py" in updated
    assert "src/demo/obsolete.py" not in updated
    assert yaml.safe_load(updated[".copier-answers.yml"])["_commit"] == "v2.0.0"
    assert not [
        name for name, text in updated.items() if "<<<<<<<" in text or name.endswith(".rej")
    ]


def test_both_sides_changed_a_line_and_git_shows_it(releases: Path, project: Path) -> None:
    data = project / "src" / "demo" / "data.py"
    replace(data, "synthesize(3_000, seed=2)", "synthesize(50, seed=9)")
    commit(project, "Our own test set")
    copier.run_update(project, defaults=True, overwrite=True, quiet=True)
    text = data.read_text()
    assert "<<<<<<<" in text and "synthesize(50, seed=9)" in text and "4_001" in text
    assert "UU src/demo/data.py" in git(project, "status", "--porcelain")
