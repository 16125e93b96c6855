"""Projects that were made without some commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from renderer import render_project

from .conftest import clean_environment, srun

IMPORT_ALL = """
import demo, pkgutil
from importlib import import_module
for module in pkgutil.walk_packages(demo.__path__, "demo."):
    if module.name != "demo.__main__":
        import_module(module.name)
from demo.__main__ import commands
print(*commands())
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with neither tools nor trackers."""
    return render_project(tmp_path_factory.mktemp("bare") / "demo", tools=[], trackers=[])


def test_nothing_asks_for_what_was_left_out(bare: Path) -> None:
    shown = subprocess.check_output(
        [sys.executable, "-c", IMPORT_ALL], cwd=bare, env=clean_environment(bare), text=True
    )
    assert shown.split() == ["train", "download", "runs"]
    for name in ("README.md", "Makefile", "docs/slurm.md", "docs/multi-node.md", "docs/recipes.md"):
        text = (bare / name).read_text()
        assert "doctor" not in text and "check_comm" not in text and "demo report" not in text
    results = (bare / "docs/results.md").read_text()
    assert "cost" not in results and "evaluate" not in results


def test_help_names_what_was_left_out_and_how_to_add_it(bare: Path) -> None:
    shown = subprocess.check_output(
        [sys.executable, "-m", "demo", "--help"], cwd=bare, env=clean_environment(bare), text=True
    )
    _, _, absent = shown.partition("not in this project: ")
    assert "report (tools)" in absent and "sync (trackers)" in absent and "runs" not in absent
    assert "make update ARGS=" in absent


def test_runs_are_shown_without_the_plug_in_of_their_costs(bare: Path, tmp_path: Path) -> None:
    assert srun(bare, tmp_path / "run", 1, "--max-steps=2").wait().codes == [0]
    command = [sys.executable, "-m", "demo", "runs", str(tmp_path / "run")]
    env = clean_environment(bare)
    assert "finished" in subprocess.check_output(command, cwd=bare, env=env, text=True)


@pytest.mark.slow
def test_it_trains_and_passes_its_tests(bare: Path, tmp_path: Path) -> None:
    assert srun(bare, tmp_path / "run", 2).wait().summary["world_size"] == 2
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        cwd=bare,
        env=clean_environment(bare),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b6 passed", done.stdout), done.stdout
