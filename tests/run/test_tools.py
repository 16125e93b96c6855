"""Projects that were made without some commands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from renderer import render_project

from .conftest import clean_environment, command, python, srun

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
    assert python(bare, IMPORT_ALL).split() == ["train", "download", "runs"]
    for name in ("README.md", "Makefile", "docs/slurm.md", "docs/multi-node.md", "docs/recipes.md"):
        text = (bare / name).read_text()
        assert "doctor" not in text and "check_comm" not in text and "demo report" not in text
    results = (bare / "docs/results.md").read_text()
    assert "cost" not in results and "evaluate" not in results


def test_help_names_what_was_left_out_and_how_to_add_it(bare: Path) -> None:
    _, _, absent = command(bare, "--help").stdout.partition("not in this project: ")
    assert "report (tools)" in absent and "sync (trackers)" in absent and "runs" not in absent
    assert "make update ARGS=" in absent


def test_it_trains_and_shows_its_run_without_the_plug_in_of_costs(
    bare: Path, tmp_path: Path
) -> None:
    job = srun(bare, tmp_path / "run", 2, "--max-steps=2").wait()
    assert job.summary["world_size"] == 2
    assert "finished" in command(bare, "runs", job.run_dir).stdout


@pytest.mark.slow
def test_it_passes_its_tests(bare: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        cwd=bare,
        env=clean_environment(bare),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b6 passed", done.stdout), done.stdout
