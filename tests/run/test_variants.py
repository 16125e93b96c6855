"""Every tree of modules that answers can lead to is run.

Each one is imported whole, and each of its commands asked for its help. Those that differ in what a
training reads are trained by two ranks, stopped and resumed, with the trackers of their answers.
tests/render/test_matrix.py renders the same answers, and proves that the trees are as many.
"""

import json
import signal
from pathlib import Path

import pytest
from renderer import render_project, shrink
from variants import TREES, Tree

from .conftest import Job, spawn, srun
from .test_examples import TABLE, TEXT

FLAGS = {"digits": (), "text": TEXT, "table": TABLE}
CHECK = """
import pkgutil
from importlib import import_module

import demo
from demo.__main__ import commands

for module in pkgutil.walk_packages(demo.__path__, "demo."):
    if module.name != "demo.__main__":
        import_module(module.name)
for name, (command, _) in commands().items():
    try:
        code = command(["--help"])
    except SystemExit as leaving:
        code = leaving.code
    assert not code, name
print("all commands:", *commands())
"""


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_every_module_is_imported_and_every_command_helps(tree: Tree, tmp_path: Path) -> None:
    project = render_project(tmp_path / "demo", **tree.answers())
    (project / "check_tree.py").write_text(CHECK)
    job = spawn(project, tmp_path / "check", [["check_tree"]], [{}]).wait()
    assert job.codes == [0], job.log
    tools = [each.replace("_", "-") for each in (*tree.tools, "runs")]
    tools += ["monitor"] * bool(tree.servers) + ["sweep"] * (tree.sweep != "none")
    tools += ["sync", "check-trackers"] * bool(tree.tracking)
    (found,) = (line for line in job.log.splitlines() if line.startswith("all commands:"))
    assert set(found.split()[2:]) == {"train", "download", *tools}


@pytest.mark.parametrize("tree", sorted({each.trained for each in TREES}), ids=str)
def test_it_trains_stops_and_goes_on(tree: Tree, tmp_path: Path) -> None:
    project = render_project(tmp_path / "demo", **tree.answers())
    if tree.example == "digits":
        shrink(project)
    flags = ("--trackers", *(tree.trackers or ["none"]), f"--run-root={tmp_path / 'runs'}")
    flags += ("--max-steps=100", "--log-every=5", *FLAGS[tree.example])

    def train() -> Job:
        return srun(project, tmp_path / "run", 2, *flags, WANDB_MODE="offline", WANDB_SILENT="true")

    job = train()
    job.wait_for_step(10)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.wait().codes == [75, 75], job.log
    resumed = train().wait()
    assert 10 <= resumed.summary["resumed_from_step"] < 100
    assert [line["step"] for line in resumed.metrics() if "train/loss" in line] == [
        *range(5, 101, 5)
    ]
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["status"], status["missed_by"]) == ("finished", []), resumed.log
    if tree.trackers:
        ids = json.loads((tmp_path / "run" / "trackers.json").read_text())
        assert set(ids) == set(tree.trackers)
