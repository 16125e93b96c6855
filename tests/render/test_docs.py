"""The pages say what the template does: they are made of it, or name only what is there."""

import ast
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import PurePosixPath

import pages
import presets
import pytest
from classes import KINDS, Classes
from questions import page
from renderer import TEMPLATE, Renderer
from tiers import FULL, is_full
from variants import MODES, SERVERS, TRACKERS, Answers, pairwise_variants, subsets

# The pages on Slurm are run line by line, and the recipes and the page on data block by block.
SLURM_PAGES = ("docs/slurm.md", "docs/stops.md")
RUN_PAGES = (*SLURM_PAGES, "docs/recipes.md", "docs/data.md")
# Commands of this repository that .ci/run runs, in another form.
IN_CI = {"make test", "make test-all", ".venv/bin/python -m pytest tests/*"}
# Commands that are not called like their modules.
IN_MODULES = {
    "download": "data",
}
ROOMS = ("", "tools/")
ENDS = (".py", "/__init__.py")
# What users or commands make.
MADE = {"slurm/site.sh", "container/image.sif", "container/release.sif"}


def test_the_page_of_questions_is_current(render: Renderer, pytestconfig: pytest.Config) -> None:
    golden(pytestconfig, "questions.md", page(render))


def test_the_tables_of_variants_and_targets_are_current(
    classes: Classes, pytestconfig: pytest.Config
) -> None:
    rows = []
    for kind, found in classes.kinds.items():
        rendered = sum(each.count for each in found.values())
        target = "test-all" if is_full(TEMPLATE / KINDS[kind]) else "test"
        rows.append(
            (kind, f"{rendered:,}", str(len(found)), f"`{KINDS[kind]}`", f"`make {target}`")
        )
    left_out = [
        (reason, ", ".join(f"`{path}`" for path in paths)) for reason, paths in FULL.items()
    ]
    page = with_rows("tested.md", "| files |", rows)
    golden(pytestconfig, "tested.md", page)
    golden(pytestconfig, "tested.md", with_rows("tested.md", "| left out of", left_out))


def test_the_table_of_sites_is_current(pytestconfig: pytest.Config) -> None:
    """It is made of the presets' first lines, and records; tests/slurm/test_sites.py takes all."""
    rows = []
    for preset in presets.read_all():
        done = ["submitted", "trained"]
        if list(TEMPLATE.glob(f"tests/slurm/sites/*/{preset.name}.lua")):
            done.append("refused without preset")
        link = f"[{preset.name}.yml](../sites/{preset.name}.yml)"
        ran = presets.ran(TEMPLATE / f"sites/records/{preset.name}.json")
        left = ", ".join(f"`{name}`" for name in preset.left)
        rows.append((preset.about, link, left, preset.unusual, ", ".join(done), ran))
    golden(pytestconfig, "sites.md", with_rows("sites.md", "| site |", rows))


def with_rows(name: str, head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a page of docs/ with other rows in the table whose head begins like this."""
    text = (TEMPLATE / "docs" / name).read_text("utf-8")
    made = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    table = rf"(?m)^({re.escape(head)}.*\n\|[-|]*\n)(?:\|.*\n)+"
    new, count = re.subn(table, lambda found: found[1] + made, text)
    assert count == 1, f"docs/{name} has {count} tables that begin with {head}"
    return new


def golden(config: pytest.Config, name: str, text: str) -> None:
    """Compare a text with a page in docs/, or write it there if that is asked for."""
    file = TEMPLATE / "docs" / name
    if config.getoption("update_golden"):
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8"), "pytest tests/render/test_docs.py --update-golden"


@pytest.fixture(scope="module")
def ours() -> dict[str, str]:
    """The pages of this repository, by path."""
    paths = [*TEMPLATE.glob("*.md"), *TEMPLATE.glob("docs/*.md"), TEMPLATE / "tests/README.md"]
    return {str(path.relative_to(TEMPLATE)): path.read_text("utf-8") for path in paths}


@pytest.fixture(scope="module")
def theirs(render: Renderer) -> list[dict[str, str]]:
    """The files of projects, with pages of all kinds."""
    variants: list[Answers] = [{"launch_modes": modes} for modes in subsets(MODES, least=1)]
    variants += [{"trackers": list(TRACKERS), "monitoring_servers": list(SERVERS)}]
    variants += pairwise_variants()
    return [render({**answers, "package_name": "demo"}) for answers in variants]


def test_every_command_is_run_or_says_what_it_needs(
    ours: dict[str, str], theirs: list[dict[str, str]]
) -> None:
    tested = IN_CI | set(shown())
    untested, used = {}, set()
    for path, text in ours.items():
        untested |= {line: path for line in unshown(text, tested, used)}
    for project in theirs:
        run = {each.line for page in SLURM_PAGES for each in pages.commands(project[page])}
        for path, text in project.items():
            if path.endswith(".md") and path not in RUN_PAGES:
                found = unshown(text, tested, used)
                untested |= {line: path for line in found if line not in run}
    assert not untested, "run these in a test with the mark `shows`, or say (needs ...) beside them"
    gone = tested - used
    assert not gone, "nothing like this is in a page any more"


def shown() -> Iterator[str]:
    """Yield the commands of pages that tests run, from their marks `shows`: patterns with stars."""
    for path in TEMPLATE.glob("tests/**/test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            for mark in getattr(node, "decorator_list", ()):
                if ast.unparse(mark).startswith("pytest.mark.shows("):
                    yield from map(ast.literal_eval, mark.args)


def unshown(text: str, tested: set[str], used: set[str]) -> Iterator[str]:
    """Yield the commands of a page that no test runs, and that need nothing special."""
    for command in pages.commands(text):
        line = re.sub(r"^\.(venv|conda)/bin/(?!python -m pytest)", "", command.line)
        patterns = {pattern for pattern in tested if fnmatchcase(line, pattern)}
        used |= patterns
        if not patterns and not command.needs:
            yield command.line


def test_links_of_this_repository_lead_somewhere(ours: dict[str, str]) -> None:
    def lookup(path: str) -> str | None:
        file = TEMPLATE / path
        if path.endswith((".md", ".md.jinja")) and file.is_file():
            return file.read_text("utf-8")
        return "" if file.exists() else None

    for path, text in ours.items():
        assert not list(broken(path, text, lookup)), path


def test_pages_of_a_project_name_only_what_it_has(theirs: list[dict[str, str]]) -> None:
    """Links, make targets, files, and commands of the package."""
    for project in theirs:
        targets = set(re.findall(r"^([a-z-]+):", project["Makefile"], re.MULTILINE))
        for path, text in project.items():
            if not path.endswith(".md"):
                continue
            assert not list(broken(path, text, project.get)), path
            commands = [command.line for command in pages.commands(text)]
            for words in (*commands, *re.findall(r"`([^`\n]+)`", text)):
                if words.startswith("make "):
                    named = takewhile(re.compile(r"[a-z-]+$").match, words.split()[1:])
                    assert targets.issuperset(named), (path, words)
                for file in re.findall(r"(?:slurm|configs|container|tests)/[\w./-]+\.\w+", words):
                    assert file in project or file in MADE, (path, words)
                for name in re.findall(r"-m demo ([a-z-]+)", words):
                    module = IN_MODULES.get(name, name.replace("-", "_"))
                    there = {f"src/demo/{room}{module}{end}" for room in ROOMS for end in ENDS}
                    assert there & project.keys(), (path, words)


def test_the_maps_of_a_project_name_all_its_modules(theirs: list[dict[str, str]]) -> None:
    for project in theirs:
        paths = [path.removeprefix("src/demo/") for path in project if path.startswith("src/demo/")]
        modules = {path for path in paths if "/" not in path} - {"__init__.py"}
        rooms = {path.partition("/")[0] + "/" for path in paths if "/" in path}
        shown = project["README.md"].partition("\nsrc/demo/\n")[2].partition("```")[0]
        assert set(re.findall(r"(?<!/)\b\w+\.py", shown)) == modules
        assert set(re.findall(r"^  (\S+/) ", shown, re.MULTILINE)) == rooms
        parts = {path.removeprefix("engine/") for path in paths if path.startswith("engine/")}
        named = re.findall(r"\b\w+(?:\.py|/(?= ))", project["src/demo/engine/__init__.py"])
        theirs_too = {"model.py", "data.py", "settings.py"}
        assert {re.sub("/.*", "/", part) for part in parts} - {"__init__.py"} == (
            {*named} - theirs_too
        )


def broken(path: str, text: str, lookup: Callable[[str], str | None]) -> Iterator[str]:
    """Yield the links of a page that lead nowhere.

    Args:
        lookup: returns the text of a path, None where there is none.
    """
    for link in pages.links(text):
        name, _, anchor = link.partition("#")
        target = lookup(resolved(path, name)) if name else text
        if target is None or (anchor and anchor not in pages.anchors(target)):
            yield link


def resolved(page: str, link: str) -> str:
    """Return the path that a link of a page means."""
    return posixpath.normpath(PurePosixPath(page).parent / link)
