"""The Python code of a project passes the type checker, as in `make lint`."""

import os
import subprocess
import sys
from pathlib import Path

import pages
import pytest
from renderer import render_project
from variants import SERVERS, TRACKERS

EVERYTHING = {
    "setup": "full",
    "trackers": list(TRACKERS),
    "monitoring_servers": list(SERVERS),
}
PROJECTS = [
    {**EVERYTHING, "sweep": "optuna"},
    {"sweep": "wandb", "example": "text", "tools": None},
    {"trackers": [], "tools": [], "example": "table"},
    {"trackers": [], "tools": [], "example": "images"},
]


def check(project: Path) -> None:
    """Run the checker in a project."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy"],
        cwd=project,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("answers", PROJECTS, ids=["digits", "text", "table", "images"])
def test_types_fit(answers: dict, tmp_path: Path) -> None:
    """With the hook of docs/hooks.md in model.py."""
    check(pages.put_hook(render_project(tmp_path / "demo", **answers)))


OWN_MODEL = """\
import math, torch
from torch import nn
import a_package_without_types

from .learner import Learner

class Model(Learner):
    names = []
    def build(self):
        self.cache = {}; x = a_package_without_types.width(math.pi)
        return nn.Linear(x, 1)

    def optimizers(self, network):
        return torch.optim.SGD(network.parameters(), lr = self.settings.lr)

    def loss(self, net: nn.Module, batch: tuple) -> torch.Tensor:
        rows, targets = batch
        return ((net(rows) - targets) ** 2).mean()

    def restore(self, names=[], path: str = None):
        if path == None: print('loading {}'.format(path))
"""
OWN_MODEL += f"\nLONG = [{'1, ' * 99}]\n"


def test_own_files_have_their_own_style(tmp_path: Path) -> None:
    """`make lint` looks there for errors and unused names, and is strict about the rest."""
    project = render_project(tmp_path / "demo")
    recipe = subprocess.check_output(
        ["make", "--dry-run", "lint", f"PYTHON={sys.executable}"], cwd=project, text=True
    )
    commands = [line for line in recipe.splitlines() if line.startswith(f"{sys.executable} -m")]

    def findings(*, types: bool = False) -> str:
        wanted = [each for each in commands if types or "mypy" not in each]
        return "".join(
            subprocess.run(each.split(), cwd=project, stdout=subprocess.PIPE, text=True).stdout
            for each in wanted
        )

    for name in ("src/demo/model.py", "src/demo/utils.py", "tests/test_mine.py", "analysis.py"):
        (project / name).write_text(OWN_MODEL)
    said = findings(types=True)
    assert "All checks passed!" in said and "Success: no issues" in said, said
    (project / "analysis.py").write_text("import math\n\n\ndef f():\n    unused = nowhere\n")
    assert {"F401", "F841", "F821"} <= set(findings().split())
    (project / "src/demo/tools/mine.py").write_text(OWN_MODEL)
    said = findings()
    assert "ANN001" in said and "1 file would" in said, said
    (project / "src/demo/tools/mine.py").write_text("import math\nx = {'a':1}\n")
    recipe = ["make", "--dry-run", "format", f"PYTHON={sys.executable}"]
    for line in subprocess.check_output(recipe, cwd=project, text=True).splitlines():
        if line.startswith(f"{sys.executable} -m"):
            subprocess.run(line.split(), cwd=project, capture_output=True)
    assert (project / "src/demo/tools/mine.py").read_text() == 'x = {"a": 1}\n'


@pytest.mark.slow
@pytest.mark.parametrize("title", pages.EXAMPLES)
def test_types_of_own_models_fit(title: str, tmp_path: Path) -> None:
    check(pages.put_example(render_project(tmp_path / "demo"), title))
