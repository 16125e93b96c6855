"""Imports between the rooms of a project's package run one way."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from renderer import Renderer

PACKAGE = Path("src/demo")
YOURS = {"model", "data", "figures", "settings"}
# What a module of a room may import, besides its own room.
MAY_IMPORT = {
    "core": set[str](),
    "tracking": {"core"},
    "program": {"core", "tracking", *YOURS},
    "tools": {"core", "tracking", "program", *YOURS},
}
# In core/, too, imports run one way: a room imports those that stand before it.
CORE = ("", "ranks", "loading", "output", "training")


def room_of(module: tuple[str, ...]) -> str:
    """Return the room of a module, by its path below the package."""
    return module[0] if module and module[0] in {"core", "tracking", "tools", *YOURS} else "program"


def imports(path: Path, text: str) -> Iterator[tuple[str, ...]]:
    """Yield the modules of the package that a module imports when it runs, below the package."""
    package = path.relative_to(PACKAGE).parts[:-1]
    tree = ast.parse(text)
    for node in ast.walk(tree):  # types alone are no dependency
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            named = (*base, *node.module.split(".")) if node.module else base
            yield from [named] if node.module else [(*base, each.name) for each in node.names]


@pytest.fixture(scope="module")
def modules(render: Renderer) -> dict[Path, str]:
    everything = {
        "setup": "full",
        "package_name": "demo",
        "trackers": ["tensorboard", "wandb", "aim", "mlflow"],
        "monitoring_servers": ["tensorboard", "aim", "mlflow"],
        "sweep": "optuna",
    }
    project = render(everything)
    found = {Path(p): text for p, text in project.items() if p.endswith(".py")}
    return {path: text for path, text in found.items() if path.is_relative_to(PACKAGE)}


def test_rooms_import_what_stands_below_them(modules: dict[Path, str]) -> None:
    wrong = []
    for path, text in modules.items():
        room = room_of(path.relative_to(PACKAGE).with_suffix("").parts)
        if room in YOURS or path.name == "__main__.py":
            continue
        for module in imports(path, text):
            if room_of(module) not in {room, *MAY_IMPORT[room]}:
                wrong.append(f"{path} imports {'.'.join(module)}")
    assert not wrong


def test_rooms_of_the_core_import_one_way(modules: dict[Path, str]) -> None:
    wrong = []
    for path, text in modules.items():
        parts = path.relative_to(PACKAGE).parts
        if parts[0] != "core":
            continue
        mine = CORE.index(parts[1] if len(parts) > 2 else "")
        for module in imports(path, text):
            theirs = CORE.index(module[1] if module[1:2] and module[1] in CORE else "")
            if theirs > mine:
                wrong.append(f"{path} imports {'.'.join(module)}")
    assert not wrong
