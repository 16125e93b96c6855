"""AGENTS.md and .editorconfig are true for a project, and CITATION.cff is valid."""

import configparser
import re
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import pytest
import yaml
from citation import check_citation
from classes import Classes
from packaging.requirements import Requirement
from renderer import QUESTIONNAIRE, TEMPLATE, Renderer, tomllib

# Patterns of .editorconfig as those of fnmatch.
PATTERNS = {
    "*": ["*"],
    "*.{py,sh,sbatch}": ["*.py", "*.sh", "*.sbatch"],
    "*.py": ["*.py"],
    "*.{yml,yaml}": ["*.yml", "*.yaml"],
    "Makefile": ["Makefile"],
}
NUMBERS = dict(enumerate(("Eight", "Nine", "Ten", "Eleven"), 8))
NAMED = {"setup": "full", "author_name": "Ada Lovelace", "author_email": "ada@example.org"}


def test_pages_agree_on_which_files_are_yours(classes: Classes) -> None:
    """They are those of `_skip_if_exists` that the project has."""
    patterns = [pattern.removeprefix("/") for pattern in QUESTIONNAIRE["_skip_if_exists"]]
    page = (TEMPLATE / "docs/updating.md").read_text("utf-8")
    listed = page.partition("## Files that are yours")[2].partition("\nIf ")[0]
    assert set(re.findall(r"`([\w./-]+)`", listed)) == {p.replace("src/*/", "") for p in patterns}
    for variant in classes.variants:
        folder = f"src/{variant.package}/"
        owned = {path for path in variant.files if any(fnmatchcase(path, p) for p in patterns)}
        text = variant.files["docs/updates.md"].partition("These files are yours")[2]
        named = set(re.findall(r"`([\w./-]+)`", text.partition("\n\n")[0]))
        assert named == {path.removeprefix(folder) for path in owned}
        text = variant.files["docs/own-model.md"].partition("\n## ")[0]
        changed = set(re.findall(r"^\| `([\w./-]+)`", text, re.M))
        assert changed == {path for path in owned if path.startswith(("src/", "configs/"))}
        text = variant.files["README.md"].partition("## 5.")[2]
        marked = re.findall(r"^ *(\S+) +yours: (.*)", text, re.M)
        named = {
            word
            for pair in marked
            for word in re.findall(r"[\w/]+\.(?:py|yaml|sh)", " ".join(pair))
        }
        assert named == {
            p.removeprefix(folder) for p in owned if p.startswith(("src/", "configs/", "slurm/"))
        }


def test_the_front_page_counts_the_files_of_a_project(render: Renderer) -> None:
    patterns = [pattern.removeprefix("/") for pattern in QUESTIONNAIRE["_skip_if_exists"]]
    files = render({"package_name": "demo"})
    yours = [path for path in files if any(fnmatchcase(path, each) for each in patterns)]
    text = " ".join((TEMPLATE / "README.md").read_text("utf-8").split())
    assert f"has {len(files)} files. {NUMBERS[len(yours)]} of" in text


def test_a_page_lists_the_tools_that_a_project_could_have(render: Renderer) -> None:
    choices = QUESTIONNAIRE["tools"]["choices"]
    rows = {
        name: f"| `{name}` | {label.partition(' (')[2].removesuffix(')')} |"
        for label, name in choices.items()
    }
    for chosen in ([], ["doctor", "usage"], [*rows]):
        page = render({"package_name": "demo", "tools": chosen})["docs/updates.md"]
        assert [name for name, row in rows.items() if row not in page] == chosen
        assert ("## Add a tool" in page) == (len(chosen) < len(rows))


def test_a_page_for_agents_is_short_and_names_what_is_there(classes: Classes) -> None:
    """The owner's files are those of `_skip_if_exists`; tests/render/test_docs.py has commands."""
    patterns = [p.removeprefix("/") for p in QUESTIONNAIRE["_skip_if_exists"] if "/" in p[1:]]
    pages = {variant.files["AGENTS.md"]: variant for variant in classes.variants}
    assert len(pages) > 30
    for text, variant in pages.items():
        assert len(text.splitlines()) <= 40
        table = "".join(line for line in text.splitlines(True) if line.startswith("| `"))
        named = set(re.findall(r"`((?:src|configs|slurm)/[\w./]+)`", table))
        owned = {path for path in variant.files if any(fnmatchcase(path, p) for p in patterns)}
        assert named == owned
        for folder in ("engine", "tools", "trackers", "train.py"):
            assert f"{folder}{'' if folder.endswith('.py') else '/'}`" in text
            assert any(p.startswith(f"src/{variant.package}/{folder}") for p in variant.files)
        (python,) = re.findall(r"^PYTHON := (.*)$", variant.files["Makefile"], re.M)
        assert set(re.findall(r"^(\S+/python) ", text, re.M)) == {python}
        assert f"the environment, in {python.partition('/')[0]}/" in text
        assert ("make image" in text or "build_image" in text) == (
            "slurm/build_image.sbatch" in variant.files
        )
        assert ("pre-commit" in text) == (".pre-commit-config.yaml" in variant.files)


def test_files_look_as_the_editors_are_told(classes: Classes) -> None:
    config = classes.variants[0].files[".editorconfig"]
    assert (TEMPLATE / ".editorconfig").read_text("utf-8").partition("\n")[2] == (
        config.partition("\n")[2]
    )
    parser = configparser.ConfigParser()
    parser.read_string(f"[top]\n{config}")
    sections = {name: parser[name] for name in parser.sections() if name != "top"}
    ruff = tomllib.loads(classes.variants[0].files["pyproject.toml"])["tool"]["ruff"]
    assert sections["*.py"]["max_line_length"] == str(ruff["line-length"])
    assert sections.keys() == PATTERNS.keys()
    distinct = {(path, text) for v in classes.variants for path, text in v.files.items()}
    for path, text in distinct:
        if path.endswith((".png", ".gitkeep")):
            continue
        told = {}
        for pattern, section in sections.items():
            if any(fnmatchcase(PurePosixPath(path).name, p) for p in PATTERNS[pattern]):
                told.update(section)
        check_look(path, text, told)


def check_look(path: str, text: str, told: dict[str, str]) -> None:
    """Check a file against the properties of .editorconfig that it has."""
    assert told["charset"] == "utf-8" and text.encode("utf-8"), path
    assert told["end_of_line"] == "lf" and "\r" not in text, path
    assert told["insert_final_newline"] == "true" and text.endswith("\n"), path
    style, size = told.get("indent_style"), int(told.get("indent_size", 0))
    if style == "tab":
        recipes = re.findall(r"(?m)^[a-z-]+:.*##.*\n(\s)", text)
        assert recipes and set(recipes) <= {"\t", "\n"}, path
    if style == "space":
        assert not re.search(r"(?m)^ *\t", text), path
    if size and not path.endswith(".py"):  # the rest of those is ruff's
        odd = [line for line in text.splitlines() if (len(line) - len(line.lstrip(" "))) % size]
        assert not odd, (path, odd)


@pytest.mark.parametrize("email", ["", "ada@example.org", "ada@localhost", "ada@x.y"])
@pytest.mark.parametrize("license", ["MIT", "none"])
def test_whoever_is_named_can_be_cited(render: Renderer, email: str, license: str) -> None:
    answers = {**NAMED, "author_email": email, "license": license, "description": ""}
    text = render(answers)["CITATION.cff"]
    check_citation(text)
    cited = yaml.safe_load(text)
    # The format wants a domain with a dot, and two letters after it.
    known = {"email": email} if email == "ada@example.org" else {}
    assert cited["authors"] == [{"name": "Ada Lovelace", **known}]
    assert cited.get("license", "none") == license and "abstract" not in cited


@pytest.mark.parametrize("project_name", ["Digits", "x" * 120])
def test_nobody_is_cited_who_was_not_named(render: Renderer, project_name: str) -> None:
    files = render({"project_name": project_name})
    assert "CITATION.cff" not in files and "CITATION" not in files[".gitignore"]


def test_words_that_yaml_takes_for_something_else_stay_words(render: Renderer) -> None:
    for name in ("1e9", "0o14", "yes", "null", "2026-01-01", "[a]", "a: b # c", "\ufffea"):
        text = render({**NAMED, "project_name": name, "package_name": "demo"})["CITATION.cff"]
        check_citation(text)
        assert yaml.safe_load(text)["title"] == name
        assert '\ntitle: "' in text


@pytest.mark.parametrize("modes", [["cpu"], ["cpu", "single_node"]], ids=str)
@pytest.mark.parametrize("environment", ["venv", "uv", "conda"])
def test_the_page_names_a_pytorch_that_is_tested(
    render: Renderer, environment: str, modes: list[str]
) -> None:
    """On GPUs, PyTorch 2.15 is not tested yet."""
    files = render({"environment": environment, "launch_modes": modes})
    python = tomllib.loads(files["pyproject.toml"])["project"]
    (tested,) = python["optional-dependencies"]["tested"]
    (shown,) = re.findall(r"^make setup TORCH=\S*?=+([\d.]+)$", files["docs/setup.md"], re.M)
    assert Requirement(tested).specifier.contains(shown)
    assert Requirement(tested).specifier.contains("2.15.0") == (modes == ["cpu"])
    assert f"older than {tested.removeprefix('torch<')} (`tested`" in files["docs/setup.md"]
