"""Each set of modules that answers can give is run.

All modules of each set are imported. Each command prints its help once for each example and tool of
sweeps. Sets that differ in the modules of a training are trained on two ranks, stopped and resumed,
with the trackers of their answers. tests/render/test_matrix.py renders all variants, and checks
that each has the files of its set.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from classes import TREES as KIND
from classes import Classes, Variant
from renderer import render_project, shrink
from variants import TRACKERS, TREES, Tree

from .conftest import Job, clean_environment, srun
from .test_examples import IMAGES, TABLE, TEXT

PARTS = 2
# Tools that act in a training, and are no commands.
PLUGINS = {"flops", "histograms", "notify", "registry", "slow_ranks", "usage"}
FLAGS = {"digits": (), "images": IMAGES, "text": TEXT, "table": TABLE}
# Imports all modules of each tree, and asks the commands for their help. What is no module of the
# tree stays imported, which is most of the time that the first one takes. The trees are links to
# the modules of few projects, and the help of a command depends on these alone.
CHECK = """
import json, os, pkgutil, sys
from contextlib import redirect_stdout
from importlib import import_module, invalidate_caches
from io import StringIO

helped = set()
for folder in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "demo"]:
        del sys.modules[name]
    os.chdir(folder)
    sys.path[0] = os.path.join(folder, "src")
    invalidate_caches()
    import demo

    for module in pkgutil.walk_packages(demo.__path__, "demo."):
        if module.name != "demo.__main__":
            import_module(module.name)
    main = import_module("demo.__main__")
    for name in main.commands():
        function = main.find_command(name)
        whole = name, os.path.realpath(sys.modules[function.__module__].__file__)
        if whole in helped:
            continue
        helped.add(whole)
        shown = StringIO()
        with redirect_stdout(shown):
            try:
                code = function(["--help"])
            except SystemExit as leaving:
                code = leaving.code
        assert not code and "usage: python -m demo" in shown.getvalue(), (folder, name)
    print(json.dumps(list(main.commands())), flush=True)
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Projects with all that answers can add, by example and sweep."""
    most = {
        "tools": sorted({tool for tree in TREES for tool in tree.tools}),
        "trackers": list(TRACKERS),
        "monitoring_servers": sorted({server for tree in TREES for server in tree.servers}),
    }
    folder = tmp_path_factory.mktemp("whole")
    return {
        (example, sweep): render_project(
            folder / f"{example}-{sweep}", setup="full", example=example, sweep=sweep, **most
        )
        for example, sweep in itertools.product(FLAGS, ("optuna", "wandb"))
    }


def link(variant: Variant, whole: Path, folder: Path) -> Path:
    """Make the modules of a variant out of links to those of a whole project, compiled ones too."""
    source = Path("src", variant.package)
    for path in map(Path, variant.files):
        if path.is_relative_to(source):
            target = Path("src/demo", path.relative_to(source))
            (folder / target).parent.mkdir(parents=True, exist_ok=True)
            (folder / target).symlink_to(whole / target)
    for room in [each for each in folder.glob("src/**/") if each.name != "src"]:
        compiled = whole / room.relative_to(folder) / "__pycache__"
        compiled.mkdir(exist_ok=True)
        (room / "__pycache__").symlink_to(compiled)
    return folder


@pytest.mark.parametrize("part", range(PARTS))
def test_every_module_is_imported_and_every_command_helps(
    classes: Classes, whole: dict[tuple[str, str], Path], tmp_path: Path, part: int
) -> None:
    found = {Tree.of(each.variant.answers): each.variant for each in classes.of(KIND)}
    trees = TREES[part::PARTS]
    folders = [
        link(
            found[tree],
            whole[tree.example, tree.sweep.replace("none", "optuna")],
            tmp_path / str(tree),
        )
        for tree in trees
    ]
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *folders],
        env=clean_environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for tree, line in zip(trees, done.stdout.splitlines(), strict=True):
        names = {*tree.tools, "runs"} - PLUGINS
        tools = [each.replace("_", "-") for each in names]
        tools += ["monitor"] * bool(tree.servers) + ["sweep"] * (tree.sweep != "none")
        if tree.trackers or tree.sweep == "wandb":
            tools += ["sync", "check-trackers"]
        assert set(json.loads(line)) == {"train", "download", *tools}, tree


def _trained() -> list[object]:
    """Return the trees to train: digits with all trackers, and without; nightly, the others."""
    found = []
    for tree in sorted({each.trained for each in TREES}):
        name = f"{tree.example}-{'+'.join(tree.trackers) or 'none'}"
        often = tree.example == "digits" and len(tree.trackers) in (0, len(TRACKERS))
        marks = () if often else pytest.mark.slow
        found.append(pytest.param(tree, marks=marks, id=name))
    return found


@pytest.mark.parametrize("tree", _trained())
def test_it_trains_stops_and_goes_on(tree: Tree, tmp_path: Path) -> None:
    project = render_project(tmp_path / "demo", **tree.answers())
    if tree.example == "digits":
        shrink(project)
    flags = ("--trackers", *(tree.trackers or ["none"]), f"--run-root={tmp_path / 'runs'}")
    flags += ("--max-steps=100", "--log-every=5", *FLAGS[tree.example])

    def train() -> Job:
        return srun(project, tmp_path / "run", 2, *flags, WANDB_MODE="offline", WANDB_SILENT="true")

    job = train()
    job.stop(10)
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
