"""After a release renames or removes something, no answer and no edit is lost."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from histories import commit, contents, git, render
from renderer import QUESTIONNAIRE, QUESTIONS, TEMPLATE, copy_template

RELEASED = Path(__file__).with_name("released.txt")
PACKAGE = Path("template/src/{{ package_name }}")
SCRIPT = "slurm/train_cpu.sbatch"


# -- names that projects rely on ------------------------------------------------------------------


def names_of_today() -> set[str]:
    """Return `question`, `question: choice` and `path` for all that this version has."""
    names = set()
    for name, question in QUESTIONS.items():
        if question.get("when") is False:
            continue
        names.add(name)
        choices = question.get("choices", [])
        for choice in choices.values() if isinstance(choices, dict) else choices:
            names.add(f"{name}: {choice['value'] if isinstance(choice, dict) else choice}")
    for path in (TEMPLATE / "template").rglob("*"):
        if path.is_file() and not {"__pycache__", ".ruff_cache"} & set(path.parts):
            names.add(rendered(str(path.relative_to(TEMPLATE))))
    return names


def rendered(path: str) -> str:
    """Return the path, in a project, of a file of the template; `*` is the package."""
    shown = path.removeprefix("template").removesuffix(".jinja")
    shown = shown.replace("{{ _copier_conf.answers_file }}", ".copier-answers.yml")
    # Before version 1.0.0, an example had a folder whose name rendered to ".".
    shown = re.sub(r"^/\{\{ '\.' if example == '\w+' \}\}", "", shown)
    return shown.replace("{{ package_name }}", "*")


def carried_on() -> set[str]:
    """Return the names of earlier versions that an update takes care of."""
    names = set()
    for question in QUESTIONS.values():
        names.update(re.findall(r"(\w+) \| default\(", str(question.get("default", ""))))
    for migration in QUESTIONNAIRE["_migrations"]:
        _, script, _, *arguments = migration["command"]
        if script.endswith("move_modules.py"):
            table = yaml.safe_load((TEMPLATE / "hooks/migrations" / arguments[-1]).read_text())
            for path, new in table["paths"].items():
                if {f"/{each}" for each in new.split()} <= names_of_today():
                    names.add(f"/{path}")
        if script.endswith("change_answer.py"):
            question, old, _ = arguments
            names.add(f"{question}: {old}")
    return names


def test_no_released_name_is_forgotten(pytestconfig: pytest.Config) -> None:
    text = RELEASED.read_text("utf-8")
    comment = [line for line in text.splitlines() if line.startswith("#")]
    released = set(text.splitlines()) - set(comment)
    if pytestconfig.getoption("note_release"):
        released |= names_of_today()
        RELEASED.write_text("\n".join([*comment, *sorted(released), ""]), "utf-8")
    forgotten = released - names_of_today() - carried_on()
    assert not forgotten, 'docs/architecture.md, "A rename", says what these need'


def test_no_path_of_any_commit_is_forgotten() -> None:
    """Until the first release, projects follow the newest commit. A path without a successor is
    in the table too, with an empty text.
    """
    log = ["git", "log", "-z", "--format=", "--name-only", "--", "template"]
    ever = subprocess.run(log, cwd=TEMPLATE, check=True, capture_output=True, text=True).stdout
    paths = {rendered(path) for path in ever.split("\0") if path}
    assert len(paths) > 200, "this is a shallow clone"
    forgotten = paths - names_of_today() - carried_on()
    assert not forgotten, "hooks/migrations/*.yaml says where each is now"


def test_migrations_run_at_their_version_only() -> None:
    for migration in QUESTIONNAIRE["_migrations"]:
        assert re.fullmatch(r"v\d+\.\d+\.\d+", migration["version"])
        script = migration["command"][1].removeprefix("{{ _copier_conf.src_path }}/")
        assert (TEMPLATE / script).is_file()


# -- from before version 1.0.0 --------------------------------------------------------------------


def copier(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Copier as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "copier", *arguments], cwd=project, capture_output=True, text=True
    )


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A copy of this template, which is no repository yet."""
    return copy_template(tmp_path / "template")


def start(template: Path, folder: Path, **answers: object) -> Path:
    """Return a project of the template's last commit, committed."""
    render(template, folder, {"package_name": "demo", **answers}, "HEAD")
    commit(folder, "From the template")
    return folder


def test_without_tags_edits_go_with_their_file(template: Path, tmp_path: Path) -> None:
    """As docs/updating.md says: no version is crossed, so no migration runs."""
    module = template / PACKAGE / "check_comm.py"
    module.write_text('"""In one module."""\n')
    commit(template, "Some commit")
    project = start(template, tmp_path / "project")
    (project / "src/demo/check_comm.py").write_text("ours = True\n")
    commit(project, "Our switch")
    module.unlink()
    commit(template, "Another commit")
    assert copier(project, "update", "--defaults").returncode == 0
    assert not list(project.glob("src/demo/check_comm.py*"))
    deleted = git(project, "diff", "--name-only", "--diff-filter=D", "HEAD")
    assert deleted == "src/demo/check_comm.py\n"


@pytest.fixture
def early(template: Path, tmp_path: Path) -> Path:
    """A project from before version 1.0.0, when two packages were modules."""
    for name in ("check_comm", "sweep"):
        (template / PACKAGE / f"{name}.py").write_text(f'"""{name}, in one module."""\n')
    commit(template, "Before the first release")
    project = start(template, tmp_path / "project")
    for name in ("check_comm", "sweep"):
        (template / PACKAGE / f"{name}.py").unlink()
    commit(template, "The first release", tag="v1.0.0")
    return project


def test_edited_modules_that_left_are_kept(template: Path, early: Path, tmp_path: Path) -> None:
    ours = '"""check_comm, in one module; with a look at our switch."""\n'
    (early / "src/demo/check_comm.py").write_text(ours)
    commit(early, "Our switch")
    done = copier(early, "update", "--defaults", "--trust")
    assert done.returncode == 0, done.stderr
    assert "src/demo/check_comm.py, which you edited" in done.stderr
    fresh = contents(render(template, tmp_path / "fresh", {"package_name": "demo"}, "v1.0.0"))
    assert contents(early) == fresh | {"src/demo/check_comm.py.old": ours}
    assert "?? src/demo/check_comm.py.old" in git(early, "status", "--porcelain")


def test_a_kept_file_takes_no_name_of_another(early: Path) -> None:
    (early / "src/demo/sweep.py").write_text("ours = True\n")
    (early / "src/demo/sweep.py.old").write_text("ours = False\n")
    commit(early, "Our sweep")
    done = copier(early, "update", "--defaults", "--trust")
    assert done.returncode == 0 and "kept as src/demo/sweep.py.old2" in done.stderr
    assert (early / "src/demo/sweep.py.old").read_text() == "ours = False\n"
    assert (early / "src/demo/sweep.py.old2").read_text() == "ours = True\n"


def test_a_module_that_took_in_others_stays_as_it_is(template: Path, tmp_path: Path) -> None:
    """It is the new version of none of them: their edits are kept beside, their deletion said."""
    package = template / PACKAGE
    new = package / "engine/checks.py"
    present = new.read_text()
    new.unlink()
    olds = ("core/ranks/consistency.py", "core/training/checks.py")
    rolls = ("tools/check_comm/roll_call.py", "tools/check_comm/timing.py")
    for name in (*olds, *rolls):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(f'"""{name}"""\n')
    commit(template, "Before the first release")
    project = start(template, tmp_path / "project")
    for name in (olds[0], rolls[0]):
        (project / "src/demo" / name).write_text("ours = True\n")
    for name in (olds[1], rolls[1]):
        (project / "src/demo" / name).unlink()
    commit(project, "Our own work")
    for name in (*olds, *rolls):
        (package / name).unlink()
    new.write_text(present)
    commit(template, "The first release", tag="v1.0.0")
    done = copier(project, "update", "--defaults", "--trust")
    assert done.returncode == 0, done.stderr
    fresh = contents(render(template, tmp_path / "fresh", {"package_name": "demo"}, "v1.0.0"))
    kept = {f"src/demo/{name}.old": "ours = True\n" for name in (olds[0], rolls[0])}
    assert contents(project) == fresh | kept
    for name in kept:
        assert f"{name.removesuffix('.old')}, which you edited, is gone; your file" in done.stderr
    gone = "which you deleted or renamed, is gone; src/demo/engine/checks.py has its"
    assert f"src/demo/{olds[1]}, {gone} contents\n" in done.stderr


def test_files_that_git_ignores_are_not_lost(template: Path, tmp_path: Path) -> None:
    """Copier overwrites them, or deletes them, and git has no copy."""
    script, page = (template / f"template/{name}.jinja" for name in (SCRIPT, "docs/slurm.md"))
    present = {path: path.read_text() for path in (script, page)}
    script.write_text(present[script].replace("# Trains", "# This trains"))
    page.unlink()
    (template / PACKAGE / "check_comm.py").write_text("An old module\n")
    commit(template, "Before the first release")
    project = start(template, tmp_path / "project")
    ours = {
        SCRIPT: f"{(project / SCRIPT).read_text()}# ours\n",  # the template changed another line
        "slurm/train_multi_node.sbatch": "# ours, and the template changed nothing\n",
        "docs/slurm.md": "# ours, and the template has one now\n",
        "src/demo/check_comm.py": "# ours, of a module that was split\n",
        "configs/train.yaml": "# ours, and an update never changes it\n",
        "notes/core/all.md": "# ours alone\n",
    }
    with (project / ".gitignore").open("a") as file:
        file.writelines(f"/{name}\n" for name in [*ours, "slurm/train_single_node.sbatch"])
    for name in ours:
        git(project, "rm", "--quiet", "--cached", "--ignore-unmatch", name)
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(ours[name])
    commit(project, "Our own work")
    (template / PACKAGE / "check_comm.py").unlink()
    for path, text in present.items():
        path.write_text(text)
    commit(template, "The first release", tag="v1.0.0")
    before = contents(project)

    done = copier(project, "update", "--defaults", "--trust")
    assert done.returncode == 0, done.stderr
    fresh = contents(render(template, tmp_path / "fresh", {"package_name": "demo"}, "v1.0.0"))
    kept = {
        "docs/slurm.md": "docs/slurm.md.old",
        "src/demo/check_comm.py": "src/demo/check_comm.py.old",
    }
    after = {kept.get(name, name): text for name, text in ours.items()}
    after[SCRIPT] = f"{fresh[SCRIPT]}# ours\n"
    assert contents(project) == fresh | after | {".gitignore": before[".gitignore"]}
    for name in ours.keys() - {"configs/train.yaml", "notes/core/all.md"}:
        assert f"\n{name}, which " in done.stderr

    # An undo restores what git has; the copies are all that there is of the others.
    folder = Path(git(project, "rev-parse", "--absolute-git-dir").strip())
    copies = contents(folder / "copier-ignored-files")
    assert {name: copies.get(name) for name in ours} == ours | {"notes/core/all.md": None}
    assert f"{folder}/copier-ignored-files has the files that git ignores" in done.stderr

    # So they are once an update was interrupted.
    git(project, "add", "--all")
    git(project, "reset", "--quiet", "--hard")
    copies = folder / "copier-moved-files"
    (copies / "ignored").mkdir(parents=True)
    before = contents(project)
    done = copier(project, "update", "--defaults", "--trust")
    assert done.returncode == 1 and f"remove {copies}, and update again" in done.stderr
    assert contents(project) == before and copies.exists()


def test_nothing_happens_without_trust(early: Path) -> None:
    done = copier(early, "update", "--defaults")
    assert done.returncode == 4
    assert "migrations" in done.stderr
    assert not git(early, "status", "--porcelain")


# -- what a later release will do -----------------------------------------------------------------


def test_a_renamed_question_reads_the_old_answer(template: Path, tmp_path: Path) -> None:
    """By its default, as docs/architecture.md says: no migration, no trust."""
    questionnaire = template / "copier.yml"
    present = questionnaire.read_text()
    for path in (questionnaire, *template.rglob("*.jinja")):
        path.write_text(re.sub(r"\bqos\b(?!=)", "service", path.read_text()))
    commit(template, "An earlier name", tag="v1.1.0")
    project = start(template, tmp_path / "project", service="night")
    question = present.index("\nqos:")
    default = present.index('default: ""', question)
    assert default < present.index("\nconstraint:", question)
    reading = "default: \"{{ service | default('') }}\""
    questionnaire.write_text(present[:default] + reading + present[default + len('default: ""') :])
    for name in ("hooks", "template"):
        for path in (TEMPLATE / name).rglob("*.jinja"):
            (template / path.relative_to(TEMPLATE)).write_bytes(path.read_bytes())
    commit(template, "Today's name", tag="v2.0.0")
    done = copier(project, "update", "--defaults")
    assert done.returncode == 0, done.stderr
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert answers["qos"] == "night" and "service" not in answers
    assert "#SBATCH --qos=night" in (project / "slurm/train_cpu.sbatch").read_text()


@pytest.mark.parametrize(
    ("question", "answer", "old", "new"),
    [
        ("sweep", "optuna", "bayes", "optuna"),
        ("launch_modes", ["cpu", "single_node"], "gpu", "single_node"),
    ],
)
def test_a_renamed_choice_stays_chosen(
    template: Path, tmp_path: Path, question: str, answer: object, old: str, new: str
) -> None:
    # A template with only the question, since choices decide about many files.
    (template / "template").rename(template / "unused")
    (template / "template").mkdir()
    answers_file = "template/{{ _copier_conf.answers_file }}.jinja"
    (template / answers_file).write_text("{{ _copier_answers | to_nice_yaml }}")
    kept = {key: QUESTIONS[question][key] for key in ("type", "choices")}
    questionnaire = {"_subdirectory": "template", question: kept | {"multiselect": old == "gpu"}}
    renamed = yaml.safe_dump(questionnaire)
    assert renamed.count(f": {new}\n") == 1
    (template / "copier.yml").write_text(renamed.replace(f": {new}\n", f": {old}\n"))
    commit(template, "An earlier name", tag="v1.1.0")
    chosen = [old if each == new else each for each in answer] if isinstance(answer, list) else old
    project = start(template, tmp_path / "project", **{question: chosen})
    migration = QUESTIONNAIRE["_migrations"][0] | {"version": "v2.0.0"}
    python, _, answers_file, *_ = migration["command"]
    script = "{{ _copier_conf.src_path }}/hooks/migrations/change_answer.py"
    migration["command"] = [python, script, answers_file, question, old, new]
    (template / "copier.yml").write_text(
        yaml.safe_dump(questionnaire | {"_migrations": [migration]})
    )
    commit(template, "Today's name", tag="v2.0.0")
    done = copier(project, "update", "--defaults", "--trust")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((project / ".copier-answers.yml").read_text())[question] == answer
