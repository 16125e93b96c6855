"""Imports between the modules of a project's package go in one direction."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from renderer import Renderer
from variants import SERVERS, TRACKERS

PACKAGE = Path("src/demo")
YOURS = {"model", "data", "figures", "settings"}
# What the modules of a room may import, besides those of the room itself.
MAY_IMPORT = {
    "engine": set[str](),
    "trackers": {"engine"},
    "program": {"engine", "trackers", *YOURS},
    "tools": {"engine", "trackers", "program", *YOURS},
}

Module = tuple[str, ...]
"""The names of a module below the package."""


def room_of(module: Module) -> str:
    """Return the room that a module is in."""
    rooms = {"engine", "trackers", "tools", *YOURS}
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
    everything = {
        "setup": "full",
        "package_name": "demo",
        "trackers": list(TRACKERS),
        "monitoring_servers": list(SERVERS),
        "sweep": "optuna",
    }
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
