"""The code lines of a project by room, and the most that each may have. `make lint` prints them.

Docstrings, comments and blank lines are not code. A commit that raises a ceiling says why.
"""

import ast
import io
import sys
import tempfile
import tokenize
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).parent / "render"))

from renderer import TOOLS, Renderer, copy_template
from variants import SERVERS, TRACKERS

# The largest project, the one of the default answers, and the one without tools and trackers.
PROJECTS: Mapping[str, Mapping[str, object]] = {
    "all": {
        "setup": "full",
        "tools": list(TOOLS),
        "trackers": list(TRACKERS),
        "monitoring_servers": list(SERVERS),
        "sweep": "optuna",
    },
    "default": {},
    "least": {"setup": "full", "tools": [], "trackers": []},
}
ROOMS = ("engine/data", "engine/ranks", "engine/run", "engine", "plugins", "tools", "trackers", "")
CEILINGS = {
    "engine": 2332,
    "engine/data": 450,
    "engine/ranks": 658,
    "engine/run": 940,
    "plugins": 910,
    "tools": 4085,
    "trackers": 900,
    "": 606,
}
NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Return the number of lines with code of a module."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # A text that stands alone is a docstring, also that of a field.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def count(files: Mapping[str, str]) -> dict[str, list[int]]:
    """Return the code lines of each module by room, for the files of a project by path."""
    found: dict[str, list[int]] = {room: [] for room in ROOMS}
    for path, text in files.items():
        source, _, *inside = PurePosixPath(path).parts if "/" in path else ("", "")
        if source == "src" and path.endswith(".py"):
            room = next(each for each in ROOMS if PurePosixPath(*inside).is_relative_to(each))
            found[room].append(code_lines(text))
    return found


def main() -> None:
    """Print a table: for each project, lines and modules by room."""
    with tempfile.TemporaryDirectory() as folder:
        render = Renderer(copy_template(Path(folder) / "template"))
        counts = {name: count(render(dict(answers))) for name, answers in PROJECTS.items()}
    print(f"{'code lines (modules)':22}" + "".join(f"{name:>14}" for name in counts) + "   at most")
    for room in ROOMS:
        cells = "".join(f"{sum(of[room]):>8} ({len(of[room]):>3})" for of in counts.values())
        print(f"{room or 'the package itself':22}{cells}{CEILINGS[room]:>10}")
    every = [[n for lines in of.values() for n in lines] for of in counts.values()]
    print(f"{'together':22}" + "".join(f"{sum(of):>8} ({len(of):>3})" for of in every))


if __name__ == "__main__":
    sys.exit(main())
