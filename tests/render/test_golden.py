"""The batch scripts are equal to reviewed copies.

After an intended change, run `pytest tests/render/test_golden.py --update-golden`, and read the
difference as a user would read the script.
"""

import shutil
import subprocess
import sys
from difflib import unified_diff
from pathlib import Path

import pytest
from renderer import Renderer

LAUNCHERS = ("srun", "torchrun")
GOLDEN = Path(__file__).parent / "golden"
ANSWERS = {
    "package_name": "demo",
    "partition": "gpu",
    "cpu_partition": "cpu",
    "account": "proj-0042",
    "gpu_type": "a100",
    "memory": "64G",
    "time_limit": "12:00:00",
    "modules": "python/3.12\ncuda/12.4",
}
SCRIPTS = [
    "train_cpu.sbatch",
    "train_single_node.sbatch",
    "train_multi_node.sbatch",
    "common.sh",
    "resume.sh",
]


def test_a_script_that_differs_is_told_and_not_written(tmp_path: Path) -> None:
    """In a copy of the repository with another golden file."""
    root = Path(__file__).parents[2]
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".docs", "results")
    copy = shutil.copytree(root, tmp_path / "copy", ignore=ignored)
    golden = copy / "tests/render/golden/train_cpu.sbatch"
    golden.write_text("another script\n")
    select = "tests/render/test_golden.py::test_batch_scripts[train_cpu.sbatch-srun]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", select]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 1 and "train_cpu.sbatch differs" in done.stdout, done.stdout
    assert golden.read_text() == "another script\n"


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_batch_scripts(
    render: Renderer, pytestconfig: pytest.Config, launcher: str, script: str
) -> None:
    """Of torchrun, only the lines are kept that differ from those of srun."""
    texts = {each: render({**ANSWERS, "launcher": each})[f"slurm/{script}"] for each in LAUNCHERS}
    lines = [text.splitlines(keepends=True) for text in texts.values()]
    change = "".join(unified_diff(*lines, *LAUNCHERS, n=0))
    golden, text = (
        (GOLDEN / script, texts["srun"])
        if launcher == "srun"
        else (GOLDEN / f"{script}.torchrun.diff", change)
    )
    if pytestconfig.getoption("update_golden"):
        golden.write_text(text) if text else golden.unlink(missing_ok=True)
    assert text == (golden.read_text() if golden.exists() else ""), (
        f"{golden.name} differs: see the docstring of this test"
    )
