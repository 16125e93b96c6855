"""Edits of a project are kept when the template moves its files, in ten ways of editing.

The old versions are commits of this repository: the first that rendered a project, the last without
subfolders of modules, the last with several modules for checkpoints, and some between them.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from histories import commit, contents, git, render, replace
from renderer import TEMPLATE, Renderer, copy_template

from hooks.migrations.imports import Imports

FIRST_DAY = "03882d74b1b8fc46b55da0c242238e84510d5bd1"
FLAT = "f8d5c72c7760566dc32d49cd6942c0929677ab24"
ROOMS = "9d9679ec7ec4cefeda4ad23cd1cc3f1243796a19"
TABLE = yaml.safe_load((TEMPLATE / "hooks/migrations/rooms.yaml").read_text("utf-8"))
OWN = ("configs/train.yaml", *(f"src/demo/{name}.py" for name in ("model", "data", "figures")))

# A line that the template changed, too.
CHANGED = (
    '"""Loss and accuracy over a whole dataset, exact on any number of ranks."""',
    '"""Loss over a whole dataset."""  # ours: a line that changed',
)
# Edited files that the new answers lack, one of them with all of its folder.
GONE = ("sync.py", "doctor/node.py")
EXECUTABLE = {
    "seeding": "engine/data/seeds",
    "errors": "engine/errors",
    "evaluation": "engine/evaluate",
}

OURS = '''\
"""A module of ours."""

import demo.errors as demo_errors
from demo.schedule import lr_factor as absolute

from . import config, seeding as seeds
from .config import (
    Positive,  # of ours
    Share,
    parse,
)


def read() -> type:
    from .sharding import ShardStream, EpochSampler; import math  # as it is

    return config.load_yaml, ShardStream, EpochSampler, math
'''
OURS_NOW = '''\
"""A module of ours."""

import demo.engine.errors as demo_errors
from demo.engine.schedule import lr_factor as absolute

from .engine import config
from .engine.data import seeds
# of ours
from .engine.config import Positive, Fraction as Share
from .config import parse


def read() -> type:
    from .engine.data.stream import ShardStream
    from .engine.data.batches import EpochSampler; import math  # as it is

    return config.load_yaml, ShardStream, EpochSampler, math
'''


def test_the_table_names_what_is_there() -> None:
    package = TEMPLATE / "template/src/{{ package_name }}"
    for new in TABLE["paths"].values():
        for path in new.split():
            assert (package / path.removeprefix("src/*/")).is_file(), path
    for full in TABLE["names"].values():
        module, _, name = full.rpartition(".")
        text = package.joinpath(*module.split(".")).with_suffix(".py").read_text("utf-8")
        assert re.search(rf"^(class|def) {name}\b|^{name} =", text, re.MULTILINE), full


# -- a project of an old version ------------------------------------------------------------------


@pytest.fixture(scope="module", params=[FIRST_DAY, FLAT], ids=["first-day", "flat"])
def old(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a template, whose v1.0.0 is the present one, and a project from before it."""
    return from_commit(request.param, tmp_path_factory.mktemp("old"))


def from_commit(old: str, folder: Path) -> Path:
    """Make a template whose v1.0.0 is the present one, and a project of an old commit."""
    template = folder / "template"
    listed = git(TEMPLATE, "ls-tree", "--name-only", old).split()
    names = [name for name in ("copier.yml", "examples", "hooks", "template") if name in listed]
    archive = subprocess.run(
        ["git", "archive", old, *names], cwd=TEMPLATE, check=True, capture_output=True
    )
    template.mkdir()
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(template)
    commit(template, "An old version")
    project = render(template, folder / "project", {"package_name": "demo"}, "HEAD")
    commit(project, "From the template")
    present = copy_template(folder / "present")
    for name in names:
        shutil.rmtree(template / name, ignore_errors=True)
    shutil.copytree(present, template, dirs_exist_ok=True)
    commit(template, "The present version", tag="v1.0.0")
    return folder


@dataclass
class Updated:
    """A project after its update, and what the update said."""

    project: Path
    said: str
    fresh: dict[str, str]


def update(old: Path, project: Path, **answers: object) -> Updated:
    """Update a project, as a user who trusts the template does."""
    data = [f"--data={name}={answer}" for name, answer in answers.items()]
    command = [sys.executable, "-m", "copier", "update", "--defaults", "--trust", *data]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers["package_name"] = "demo"
    fresh = contents(render(old / "template", project.parent / "fresh", answers, "v1.0.0"))
    return Updated(project, done.stderr, fresh)


def add_after(path: Path, start: str, line: str) -> None:
    """Add a line below the only one that starts with a text."""
    text = path.read_bytes().decode()
    assert len(re.findall(rf"^{re.escape(start)}", text, re.MULTILINE)) == 1, (path, start)
    path.write_bytes(re.sub(rf"(?m)^({re.escape(start)}.*\n)", rf"\1{line}\n", text).encode())


@pytest.fixture(scope="module")
def edited(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Updated:
    """A project that was edited in ways that do not disturb each other, and updated."""
    project = tmp_path_factory.mktemp("edited") / "project"
    shutil.copytree(old / "project", project)
    package = project / "src/demo"
    add_after(package / "seeding.py", "    return random.Random(", "    # ours: inside a function")
    top = package / "provenance.py"
    top.write_text(f"from .errors import UsageError as OurError\n{top.read_text()}")
    add_after(package / "schedule.py", "import math", "# ours: among the imports")
    (package / "preemption.py").rename(package / "our_signals.py")
    (package / "ours.py").write_text(OURS)
    (project / "tests/test_ours.py").write_text("from demo.errors import UsageError\n")
    add_after(package / "distributed.py", "class World", "    # ours: in a split module")
    crlf = package / "launcher.py"
    add_after(crlf, "FIRST_SPECIAL_STEP", "# ours: in a file with other ends of lines")
    crlf.write_bytes(crlf.read_bytes().replace(b"\n", b"\r\n"))
    replace(package / "evaluation.py", *CHANGED)
    (package / "folder.py").mkdir()
    (package / "folder.py/text").write_text("ours\n")
    (package / "link.py").symlink_to("nowhere")
    for name in GONE:
        if (package / name).exists():
            with (package / name).open("a") as file:
                file.write("# ours: in a file that has gone\n")
    for name in EXECUTABLE:
        (package / f"{name}.py").chmod(0o755)
    commit(project, "Our own work")
    return update(old, project, trackers=[], tools=["plot"])


# -- what becomes of each edit --------------------------------------------------------------------


def test_an_unedited_project_becomes_a_fresh_render(old: Path, tmp_path: Path) -> None:
    project = shutil.copytree(old / "project", tmp_path / "project")
    updated = update(old, project)
    after = contents(project)
    own = {path: after[path] for path in OWN if path in after}
    assert after == updated.fresh | own
    lines = [line for line in updated.said.splitlines() if line.startswith(("src/", "tests/"))]
    follow = {f"src/demo/{name}.py" for name in ("model", "data")}
    assert {line.partition(": its imports now name")[0] for line in lines} == follow, lines
    imports_work(project, "demo.data", "demo.model")


def imports_work(project: Path, *modules: str) -> None:
    """Import modules of a project in a process of its own."""
    subprocess.run(
        [sys.executable, "-c", f"import {', '.join(modules)}"],
        env={**os.environ, "PYTHONPATH": str(project / "src")},
        check=True,
    )


@pytest.mark.parametrize(
    ("old_name", "new_name", "line"),
    [
        ("seeding", "engine/data/seeds", "    # ours: inside a function"),
        ("provenance", "engine/run/provenance", "from ..errors import UsageError as OurError"),
        ("schedule", "engine/schedule", "# ours: among the imports"),
        ("launcher", "engine/ranks/environment", "# ours: in a file with other ends of lines"),
        ("evaluation", "engine/evaluate", CHANGED[1]),
    ],
)
def test_an_edit_goes_along(edited: Updated, old_name: str, new_name: str, line: str) -> None:
    path, new = f"src/demo/{old_name}.py", f"src/demo/{new_name}.py"
    text = (edited.project / new).read_bytes().decode()
    assert line in text.splitlines()
    assert not (edited.project / path).exists()
    conflict = "<<<<<<< before updating" in text
    how = "with conflicts: look for <<<<<<< in it" if conflict else "with your edits"
    assert f"{path}, which you edited, is now {new}, {how}\n" in edited.said
    status = git(edited.project, "status", "--porcelain", "--untracked-files=all")
    assert f"{'UU' if conflict else '??'} {new}\n" in status
    assert conflict or old_name != "evaluation"
    if not conflict:  # and nothing else
        ours = [each for each in text.splitlines() if each.strip()]
        fresh = [each for each in edited.fresh[new].splitlines() if each.strip()]
        assert [each for each in ours if each != line] == fresh
    assert ("\r\n" in text) == (old_name == "launcher")


def test_an_edited_file_that_was_split_is_kept(edited: Updated) -> None:
    kept = edited.project / "src/demo/distributed.py.old"
    assert "    # ours: in a split module\n" in kept.read_text()
    (line,) = [line for line in edited.said.splitlines() if "distributed.py.old" in line]
    assert "src/demo/engine/ranks/world.py, src/demo/engine/ranks/process_group.py" in line


def test_a_renamed_file_stays_away(edited: Updated) -> None:
    """As one that was deleted does: `test_no_edit_of_any_file_is_lost` deletes a folder."""
    package = edited.project / "src/demo"
    assert "class StopRequest" in (package / "our_signals.py").read_text()
    assert not (package / "preemption.py").exists()
    assert not (package / "engine/ranks/signals.py").exists()
    now = "which you deleted or renamed, is now src/demo/engine/ranks/signals.py; it stays deleted"
    assert f"src/demo/preemption.py, {now}\n" in edited.said


def test_imports_of_own_files_follow(edited: Updated) -> None:
    assert (edited.project / "src/demo/ours.py").read_text() == OURS_NOW
    tests = (edited.project / "tests/test_ours.py").read_text()
    assert tests == "from demo.engine.errors import UsageError\n"
    for name in ("src/demo/ours.py", "src/demo/data.py", "tests/test_ours.py"):
        assert f"{name}: its imports now name the new modules\n" in edited.said
    by_hand = "change this by hand\n"
    now = "is now Settings.parse of settings.py"
    assert f"src/demo/ours.py:8: parse of config {now}: {by_hand}" in edited.said
    now = "is now Settings.from_yaml of settings.py"
    assert f"src/demo/ours.py:17: load_yaml of config {now}: {by_hand}" in edited.said
    imports_work(edited.project, "demo.data", "demo.model")


def test_all_else_is_a_fresh_render(edited: Updated) -> None:
    """And each line that was ours is somewhere."""
    after = {path: text for path, text in contents(edited.project).items() if path not in OWN}
    differ = {
        path for path in after.keys() | edited.fresh if after.get(path) != edited.fresh.get(path)
    }
    package = "src/demo/"
    names = {path.removeprefix(package).removesuffix(".py") for path in differ - set(OWN)}
    assert names - {f"{name}.old" for name in GONE} == {
        *("engine/data/seeds", "engine/run/provenance", "engine/schedule", "engine/evaluate"),
        *("engine/ranks/environment", "engine/ranks/signals"),
        *("distributed.py.old", "our_signals", "ours", "tests/test_ours", "folder.py/text"),
    }
    assert not Path(
        git(edited.project, "rev-parse", "--git-dir").strip(), "copier-moved-files"
    ).exists()


@pytest.mark.parametrize("name", GONE)
def test_a_file_that_other_answers_lack_is_kept(edited: Updated, name: str) -> None:
    kept = edited.project / f"src/demo/{name}.old"
    if git(edited.project, "ls-tree", "HEAD", f"src/demo/{name}"):  # the first day had none
        assert "# ours: in a file that has gone\n" in kept.read_text()
        assert f"src/demo/{name}, which you edited" in edited.said
    else:
        assert not kept.exists()


def test_an_executable_file_stays_executable(edited: Updated) -> None:
    """One that was edited, one that was not, and one with conflicts."""
    for new in EXECUTABLE.values():
        assert os.access(edited.project / f"src/demo/{new}.py", os.X_OK), new
    stages = git(edited.project, "ls-files", "--unmerged").splitlines()
    assert stages and all(stage.startswith("100755") for stage in stages)
    assert not os.access(edited.project / "src/demo/engine/run/meters.py", os.X_OK)


# -- imports alone --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from .errors import UsageError  # why\r\nx = 1\r\n", None),
        ("from . import errors, files\n", "from .engine import errors, filesystem as files\n"),
        ("from ..errors import UsageError\n", "from ..errors import UsageError\n"),
        ("from .sharding import *\n", "from .sharding import *\n"),
        (
            "if x: from .errors import A, UsageError\n",
            "if x: from .errors import A; from .engine.errors import UsageError\n",
        ),
        ("import demo.errors\n", "import demo.errors\n"),
        ("from . import left\nleft.any()\n", "from . import left\nleft.any()\n"),
        ("from .errors import Lost\n", "from .errors import Lost\n"),
        ("from demo import errors as e\n", "from demo.engine import errors as e\n"),
        ("from .ours import errors\n", "from .ours import errors\n"),
        ("from .engine.errors import UsageError\n", "from .engine.errors import UsageError\n"),
        ("no python (\n", "no python (\n"),
        ("\ufefffrom .errors import UsageError\n", "\ufefffrom .engine.errors import UsageError\n"),
    ],
)
def test_imports_are_rewritten_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (
        ("errors", "class UsageError: ...\nclass Lost: ...  # another one"),
        ("filesystem", ""),
        ("stream", ""),
    ):
        file = Path(f"src/demo/engine/{name}.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    moved = {
        "errors": ["errors"],
        "files": ["filesystem"],
        "left": [],
        "sharding": ["stream", "filesystem"],
    }
    imports = Imports(
        "demo",
        {
            f"src/demo/{old}.py": [f"src/demo/engine/{each}.py" for each in new]
            for old, new in moved.items()
        },
        names={},
        gone={"errors.Lost": "nothing"},
    )
    here = Path("src/demo/ours.py")
    result, problems = imports.rewrite(before.encode(), here, here)
    due = before.replace(".errors", ".engine.errors") if after is None else after
    assert result.decode() == due
    by_hand = {
        "from .sharding import *\n",
        "import demo.errors\n",
        "from . import left\nleft.any()\n",
        "from .errors import Lost\n",
        "if x: from .errors import A, UsageError\n",
    }
    assert bool(problems) == (before in by_hand)


def test_edits_of_modules_that_became_one_are_kept_and_it_stays(tmp_path: Path) -> None:
    old = from_commit(ROOMS, tmp_path)
    package = old / "project/src/demo"
    (package / "validate.py").unlink()
    for name in ("finish", "core/checkpoint/store", "core/training/checks"):
        with (package / f"{name}.py").open("a") as file:
            file.write("# ours\n")
    commit(old / "project", "Our own work")
    updated = update(old, old / "project")
    for name, now in (
        ("finish", "train"),
        ("core/checkpoint/store", "engine/checkpoint_files"),
        ("core/training/checks", "engine/checks"),
    ):
        assert (package / f"{name}.py.old").read_text().endswith("# ours\n")
        assert (package / f"{now}.py").read_text() == updated.fresh[f"src/demo/{now}.py"]
        said = f"{name}.py, which you edited, is gone; your file is kept as src/demo/{name}.py.old"
        assert f"{said}, and src/demo/{now}.py" in updated.said
    said = "src/demo/validate.py, which you deleted or renamed, is gone; src/demo/train.py has"
    assert said in updated.said


# -- every file of many versions ------------------------------------------------------------------

VERSIONS = {
    "first-day": FIRST_DAY,
    "one-checkpoint": "57f8b1a",
    "flat": FLAT,
    "votes": "20a9027",
    "learner": "5830123",
    "core": "bb22b6c",
    "rooms": ROOMS,
    "first-node": "dcb1bf2",
    "one-train": "f105273",
}
ANSWERS = {"trackers": ["tensorboard", "mlflow"], "tools": ["plot"], "launcher": "torchrun"}
UNMARKED = {".copier-answers.yml", ".gitignore"}  # Copier's own; what the test itself changes


@pytest.fixture(scope="module")
def renewed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The paths of a new project with the answers that the updates change to."""
    template = copy_template(tmp_path_factory.mktemp("renewed") / "template")
    return Renderer(template)({"package_name": "demo", **ANSWERS}).keys()


@pytest.mark.parametrize("version", VERSIONS)
def test_no_edit_of_any_file_is_lost(version: str, renewed: set[str], tmp_path: Path) -> None:
    """Other answers in the same update, files that git ignores, and a folder that is gone."""
    folder = from_commit(VERSIONS[version], tmp_path)
    project = folder / "project"
    moved = {old.replace("*", "demo"): new for old, new in TABLE["paths"].items()}
    tracking = [path for path in contents(project) if path.startswith("src/demo/tracking/")]
    shutil.rmtree(project / "src/demo/tracking")
    paths = sorted(contents(project).keys() - UNMARKED)
    ignored = paths[::3]
    for path in paths:
        with (project / path).open("a") as file:
            file.write(f"\n# ours: {path}\n")
    with (project / ".gitignore").open("a") as file:
        file.writelines(f"/{path}\n" for path in ignored)
    git(project, "rm", "--quiet", "--cached", *ignored)
    commit(project, "Our own work")
    data = [f"--data={name}={answer}" for name, answer in ANSWERS.items()]
    command = [sys.executable, "-m", "copier", "update", "--defaults", "--trust", *data]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = contents(project)
    everything = "\n".join(after.values())
    lost = {path for path in paths if f"# ours: {path}\n" not in everything}
    # As docs/updating.md says, git alone has a file that only the other answers take away.
    assert lost <= set(paths) - renewed - moved.keys() - set(ignored)
    assert lost <= set(git(project, "ls-files", "--deleted").split())
    for path in paths:
        if path in moved and path not in lost:
            assert f"{path}, which " in done.stderr
    assert len(tracking) > 1
    assert not {moved[path].replace("*", "demo") for path in tracking} & after.keys()
