"""`copier update` brings a later template into a project that its owner has edited.

The histories are real: a repository with two tagged releases of the template, and a project with
commits of its own.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import copier
import pytest
import yaml
from histories import DIGITS, commit, contents, git, render, replace
from renderer import copy_template
from variants import pairwise_variants

ANSWERS = {"package_name": "demo", "partition": "gpu", "modules": "cuda/12.4"}
# Copier's own record, what is the user's from the first day on, and a file that stayed as it was.
UNTOUCHED = ("{{ _copier_conf.answers_file }}.jinja", "constraints.txt", "model.py")


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of this template: v1.0.0 is an earlier state, v2.0.0 the present one."""
    folder = copy_template(tmp_path_factory.mktemp("releases") / "template")
    package = folder / "template" / "src" / "{{ package_name }}"
    digits = folder / DIGITS / "src" / "{{ package_name }}"
    present = {path: path.read_bytes() for path in folder.rglob("template/**/*") if path.is_file()}

    # The earlier state: a test set of another size, no schedule, one more module, and every file
    # ended with another line.
    replace(digits / "data.py", "synthesize(4_001, seed=2)", "synthesize(3_000, seed=2)")
    replace(package / "train.py", '"""The training loop."""', '"""The old loop."""')
    (package / "schedule.py").unlink()
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


def update(project: Path, **answers: object) -> dict[str, str]:
    """Bring a project to the present release, as `copier update` does; return its files."""
    copier.run_update(project, data=answers, defaults=True, overwrite=True, quiet=True)
    return contents(project)


@pytest.fixture
def project(releases: Path, tmp_path: Path) -> Path:
    """A project of the earlier release, committed."""
    return start(releases, tmp_path / "project", ANSWERS)


VARIANTS = pairwise_variants()


@pytest.mark.parametrize("answers", VARIANTS, ids=range(len(VARIANTS)))
def test_an_unedited_project_becomes_a_fresh_render(
    releases: Path, tmp_path: Path, answers: Mapping[str, Any]
) -> None:
    project = start(releases, tmp_path / "project", answers)
    assert "# The end of an earlier version" in (project / "README.md").read_text()
    fresh = render(releases, tmp_path / "fresh", answers, "v2.0.0")
    assert update(project) == contents(fresh)


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
        fresh = render(releases, tmp_path / name, ANSWERS | before | answers, "v2.0.0")
        assert update(project, **answers) == contents(fresh)
        commit(project, f"Updated {name}")


def test_edits_are_kept(project: Path) -> None:
    """A network, a script's flag and module, a setting, a text; a file deleted and one renamed."""
    package = project / "src" / "demo"
    model = '"""Our network."""\n\nfrom torch import nn\n\n\ndef build() -> nn.Module: ...\n'
    (package / "model.py").write_text(model)
    replace(package / "data.py", "MEAN, DEVIATION = 33.3, 78.6", "MEAN, DEVIATION = 0.0, 255.0")
    script = project / "slurm" / "train_multi_node.sbatch"
    replace(script, "#SBATCH --nodes=2\n", "#SBATCH --nodes=8\n#SBATCH --switches=1\n")
    replace(script, "load_module cuda/12.4\n", "load_module cuda/12.9\nload_module nccl/2.27\n")
    replace(project / "configs" / "train.yaml", "epochs: 1\n", "epochs: 90\n")
    (project / "slurm" / "site.sh").write_text("export NCCL_SOCKET_IFNAME=ib0\n")
    replace(project / "README.md", "## 2. Train here\n", "Our results.\n\n## 2. Train here\n")
    (package / "mnist.py").unlink()
    cpu = project / "slurm" / "train_cpu.sbatch"
    cpu.rename(cpu.with_name("laptop.sbatch"))
    commit(project, "Our own work")
    edited = contents(project)

    updated = update(project)
    assert (package / "model.py").read_text() == model
    # Their line and ours in the same file.
    assert "MEAN, DEVIATION = 0.0, 255.0" in updated["src/demo/data.py"]
    assert "synthesize(4_001, seed=2)" in updated["src/demo/data.py"]
    assert '"""The training loop."""' in updated["src/demo/train.py"]
    for name in ("slurm/train_multi_node.sbatch", "configs/train.yaml", "README.md"):
        kept = edited[name].replace("# The end of an earlier version", "")
        assert updated[name].rstrip() == kept.rstrip()
    assert updated["slurm/site.sh"] == edited["slurm/site.sh"]
    assert "src/demo/mnist.py" not in updated, "a deleted file stays deleted"
    assert "slurm/train_cpu.sbatch" not in updated, "and a renamed one does not come back"
    assert updated["slurm/laptop.sbatch"] == edited["slurm/laptop.sbatch"]
    assert "src/demo/schedule.py" in updated
    assert "src/demo/obsolete.py" not in updated
    assert yaml.safe_load(updated[".copier-answers.yml"])["_commit"] == "v2.0.0"
    assert not [
        name for name, text in updated.items() if "\n<<<<<<< " in text or name.endswith(".rej")
    ]


def test_both_sides_changed_a_line_and_git_shows_it(project: Path) -> None:
    data = project / "src" / "demo" / "data.py"
    replace(data, "synthesize(3_000, seed=2)", "synthesize(50, seed=9)")
    commit(project, "Our own test set")
    text = update(project)["src/demo/data.py"]
    assert "<<<<<<<" in text and "synthesize(50, seed=9)" in text and "4_001" in text
    assert "UU src/demo/data.py" in git(project, "status", "--porcelain")
