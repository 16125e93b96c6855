"""A project's package has rooms: imports between them go in one direction, and they stay small."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from renderer import Renderer
from rooms import CEILINGS, PROJECTS, count

PACKAGE = Path("src/demo")
YOURS = {"model", "data", "figures", "settings"}
# What the modules of a room may import, besides those of the room itself.
MAY_IMPORT = {
    "engine": set[str](),
    "trackers": {"engine"},
    "plugins": {"engine"},
    "program": {"engine", "plugins", "trackers", *YOURS},
    "tools": {"engine", "plugins", "trackers", "program", *YOURS},
}

Module = tuple[str, ...]
"""The names of a module below the package."""


def room_of(module: Module) -> str:
    """Return the room that a module is in."""
    rooms = {"engine", "plugins", "trackers", "tools", *YOURS}
    return module[0] if module and module[0] in rooms else "program"


def imports(module: Module, text: str, modules: set[Module]) -> Iterator[Module]:
    """Yield the modules of the package that a module imports, in functions and for types too."""
    here = module if (*module, "__init__") in modules else module[:-1]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level + 1]
            named = (*base, *node.module.split(".")) if node.module else base
            for each in node.names:
                yield (*named, each.name) if (*named, each.name) in modules else named


@pytest.fixture(scope="module")
def graph(render: Renderer) -> dict[Module, set[Module]]:
    """What each module imports, in a project that has all of them."""
    everything = {**PROJECTS["all"], "package_name": "demo"}
    texts = {
        Path(path).relative_to(PACKAGE).with_suffix("").parts: text
        for path, text in render(everything).items()
        if path.endswith(".py") and Path(path).is_relative_to(PACKAGE)
    }
    packages = {parts[:-1]: text for parts, text in texts.items() if parts[-1] == "__init__"}
    modules = {*texts, *packages}
    return {
        module: set(imports(module, text, modules))
        for module, text in (texts | packages).items()
        if module[-1:] != ("__init__",)
    }


def test_rooms_import_what_stands_below_them(graph: dict[Module, set[Module]]) -> None:
    wrong = [
        f"{'.'.join(module)} imports {'.'.join(each)}"
        for module, imported in graph.items()
        if (room := room_of(module)) not in YOURS
        for each in imported
        if room_of(each) not in {room, *MAY_IMPORT[room]}
    ]
    assert not wrong


def test_no_imports_form_a_circle(graph: dict[Module, set[Module]]) -> None:
    # The names that engine/ offers are imported there when they are used.
    TopologicalSorter({**graph, ("engine",): set()}).prepare()


def test_no_room_has_more_lines_than_it_may(render: Renderer) -> None:
    found = {room: sum(lines) for room, lines in count(render(dict(PROJECTS["all"]))).items()}
    assert {room: lines for room, lines in found.items() if lines > CEILINGS[room]} == {}
    # A ceiling far above its room would let it grow unseen.
    assert {room: lines for room, lines in found.items() if lines < 0.9 * CEILINGS[room]} == {}
