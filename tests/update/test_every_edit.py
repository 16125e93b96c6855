"""A version with a change of each kind reaches a project in which every file was edited.

The older version is the present one. From the first tag on, it is also the last tagged version, and
the present one is the newer.
"""

import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml
from histories import commit, contents, git, make_update, render, replace
from renderer import TEMPLATE, TOOLS, copy_template

TAGS = git(TEMPLATE, "tag", "--merged", "HEAD", "--sort=-version:refname").split()
ANSWERS = {
    "package_name": "demo",
    "ci": "gitlab",
    "time_limit": "02:00:00",
    "tools": [*TOOLS],
}
CHANGED = {"trackers": ["tensorboard", "mlflow"], "tools": ["report"], "launcher": "torchrun"}
# Copier's own, what the test itself changes, and what is no text.
UNTOUCHED = (".copier-answers.yml", ".gitignore", "docs/report.png")


def tagged(folder: Path, tag: str) -> Path:
    """Return a repository with two versions: a tagged one and the present one."""
    archive = subprocess.run(["git", "archive", tag], cwd=TEMPLATE, check=True, capture_output=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder / "template", filter="data")
    commit(folder / "template", "The tagged version", tag="v1.0.0")
    history = (folder / "template/.git").rename(folder / "history")
    shutil.rmtree(folder / "template")
    present = copy_template(folder / "template")
    history.rename(present / ".git")
    commit(present, "The present version", tag="v2.0.0")
    return present


def changed(folder: Path) -> Path:
    """Return a repository with two versions: the present one, and one with every kind of change."""
    template = copy_template(folder / "template")
    commit(template, "The present version", tag="v1.0.0")
    files, questions = template / "template", template / "copier.yml"
    replace(questions, "    GitLab CI: gitlab\n", "")
    text, limit = questions.read_text(), 'default: "01:00:00"'
    assert text.count(limit) == 1
    questions.write_text(
        text.replace(limit, 'default: "03:00:00"')
        + "\ngreeting:\n  type: str\n  help: How should it greet?\n  default: hello\n"
    )
    for path in files.rglob("*"):
        named = path.name.removesuffix(".jinja")
        if path.is_file() and path.suffix != ".png" and "answers_file" not in named:
            path.write_text(f"# new\n{path.read_text()}")  # a line beside the user's
    (files / "docs/large-data.md").rename(files / "docs/big-data.md")
    (files / "docs/hooks.md.jinja").unlink()
    (files / "docs/new.md.jinja").write_text("{{ greeting }}\n")
    commit(template, "The next version", tag="v2.0.0")
    return template


@pytest.fixture(scope="module", params=["", *TAGS[:1]], ids=["changed", *TAGS[:1]])
def template(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of the template with two versions."""
    folder = tmp_path_factory.mktemp("versions")
    return tagged(folder, request.param) if request.param else changed(folder)


def mark(path: str) -> str:
    """Return the user's line in a file."""
    return f"# ours: {path}\n"


def test_no_edit_of_any_file_is_lost(template: Path, tmp_path: Path) -> None:
    """Answers change in the same update; git ignores files, and does not look at others."""
    project = render(template, tmp_path / "project", ANSWERS, "v1.0.0")
    commit(project, "From the template")
    paths = sorted(contents(project).keys() - {*UNTOUCHED})
    ignored, flagged = paths[::3], paths[1::6]
    with (project / ".gitignore").open("a") as file:
        file.writelines(f"/{path}\n" for path in ignored)
    git(project, "rm", "--quiet", "--cached", *ignored)
    for path in paths:
        if path not in flagged:
            with (project / path).open("a") as file:
                file.write(f"\n{mark(path)}")
    commit(project, "Our own work")
    for number, path in enumerate(flagged):
        flag = ("--skip-worktree", "--assume-unchanged")[number % 2]
        git(project, "update-index", flag, path)
        with (project / path).open("a") as file:
            file.write(f"\n{mark(path)}")
    done = make_update(project, " ".join(f"--data '{k}={v}'" for k, v in CHANGED.items()))
    assert done.returncode == 0, done.stderr

    after = contents(project)
    lost = [path for path in paths if mark(path) not in after.get(path, "")]
    (saved,) = (project / ".git/before-update").iterdir()
    for path in lost:
        assert f"    {path}\n" in done.stdout, path
        hidden = path in ignored or path in flagged
        kept = (saved / path).read_text() if hidden else git(project, "show", f"HEAD:{path}")
        assert mark(path) in kept
    answers = yaml.safe_load(after[".copier-answers.yml"])
    fresh = contents(render(template, tmp_path / "fresh", answers, "v2.0.0"))
    assert lost and not fresh.keys() & {*lost}, "it is in neither version, or it moved"


def test_each_kind_of_change_arrives(tmp_path: Path) -> None:
    template = changed(tmp_path)
    project = render(template, tmp_path / "project", ANSWERS, "v1.0.0")
    page = project / "docs/large-data.md"
    page.write_text(f"{page.read_text()}\n{mark('large')}")
    commit(project, "From the template")
    done = make_update(project)
    assert done.returncode == 0, done.stderr
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert (answers["greeting"], answers["ci"]) == ("hello", "none")
    assert answers["time_limit"] == "02:00:00", "an answer stays if its default changes"
    told = dict(re.findall(r"^answers: ([-+])(ci: \w+|greeting: \w+)$", done.stdout, re.MULTILINE))
    assert told == {"-": "ci: gitlab", "+": "greeting: hello"}
    fresh = render(template, tmp_path / "fresh", {**ANSWERS, "ci": "none"}, "v2.0.0")
    own = {path for path, text in contents(project).items() if not text.startswith("# new\n")}
    after, expected = contents(project), contents(fresh)
    assert {path for path in expected if after[path] != expected[path]} <= own
    assert after.keys() == expected.keys() and "docs/big-data.md" in after
    assert "    docs/large-data.md\n" in done.stdout and "docs/hooks.md" not in done.stdout


def test_a_renamed_question_or_choice_reads_the_old_answer(tmp_path: Path) -> None:
    """By its default, as docs/extending.md says."""
    template = copy_template(tmp_path / "template")
    questions = template / "copier.yml"
    present = questions.read_text()
    for path in (questions, *template.rglob("*.jinja")):
        path.write_text(re.sub(r"\bqos\b(?!=)", "service", path.read_text()))
    replace(questions, "    GitLab CI: gitlab\n", "    GitLab CI: lab\n")
    commit(template, "Earlier names", tag="v1.0.0")
    answers = {"package_name": "demo", "service": "night", "ci": "lab"}
    project = render(template, tmp_path / "project", answers, "v1.0.0")
    commit(project, "From the template")
    questions.write_text(present)
    for name, default in (
        ("qos", "{{ service | default('') }}"),
        ("ci", "{{ 'gitlab' if _external_data.recorded.ci == 'lab' else 'none' }}"),
    ):
        text = questions.read_text()
        entry = re.search(rf"^{name}:\n(?:  .*\n)*?  default: (.*)\n", text, re.MULTILINE)
        assert entry
        questions.write_text(f'{text[: entry.start(1)]}"{default}"{text[entry.end(1) :]}')
    for name in ("hooks", "template"):
        for path in (TEMPLATE / name).rglob("*.jinja"):
            (template / path.relative_to(TEMPLATE)).write_bytes(path.read_bytes())
    commit(template, "Today's names", tag="v2.0.0")
    done = make_update(project)
    assert done.returncode == 0, done.stderr
    now = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert (now["qos"], now["ci"]) == ("night", "gitlab") and "service" not in now
    assert "#SBATCH --qos=night" in (project / "slurm/train_cpu.sbatch").read_text()
