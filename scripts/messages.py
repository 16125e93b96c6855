"""List the texts of all errors and warnings, to read them in one go: python scripts/messages.py.

A line has the file, the line, what takes the text (UsageError, warning, fail), and the text with
its values as {names}. `--all` adds every other sentence in the code, such as log lines of a run.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

Found = Iterator[tuple[int, str, str]]
"""The line, what takes the text, and the text."""

ROOT = Path(__file__).resolve().parent.parent
SHOWN = re.compile(r"\w+Error|Failure|Finding|error|exception|warning|warn|exit|fail|validator")
SENTENCE = re.compile(r"[\w}')] +[\w{'(-]")
SHELL = re.compile(r'\b(fail|say|echo) +"(.*)"')
VALIDATOR = re.compile(r"^(?!.*%\}|[ '~])(.* .*)$", re.MULTILINE)


def text_of(node: ast.AST) -> str:
    """Return the text of a string, an f-string or a sum with one; else an empty text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.FormattedValue(value=value):
            return f"{{{ast.unparse(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right) if text_of(left) or text_of(right):
            return "".join(text_of(each) or f"{{{ast.unparse(each)}}}" for each in (left, right))
    return ""


def in_python(node: ast.AST, taker: str = "text") -> Found:
    """Yield the sentences in a syntax tree, without docstrings."""
    if SENTENCE.search(text := text_of(node)):
        yield getattr(node, "lineno", 0), taker, text
    elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        if isinstance(node, ast.Call):
            taker = ast.unparse(node.func).rpartition(".")[2]
        for child in ast.iter_child_nodes(node):
            yield from in_python(child, taker)


def in_shell(code: str) -> Found:
    """Yield what a shell script or a Makefile prints; errors begin with `error:`."""
    for match in SHELL.finditer(code):
        taker = "error" if match[2].startswith("error: ") else match[1]
        yield code.count("\n", 0, match.start()) + 1, taker, match[2]


def in_validators(code: str) -> Found:
    """Yield the lines that the validators of answers render, or the macros that make them."""
    code = re.sub(r"\{[=%].*?[=%]\}", lambda tag: "\n" * tag[0].count("\n"), code, flags=re.DOTALL)
    for match in VALIDATOR.finditer(code):
        yield code.count("\n", 0, match.start()) + 1, "validator", match[1]


def main() -> None:
    """Print the messages of all files that users run."""
    folders = [ROOT / name for name in ("examples", "hooks", "template", "scripts")]
    files = [path for folder in folders for path in sorted(folder.rglob("*.*"))]
    for path in files:
        name = path.relative_to(ROOT)
        if "tests" not in name.parts and path != Path(__file__).resolve() and path.is_file():
            if path.suffix == ".py":
                found = in_python(ast.parse(path.read_text(encoding="utf-8")))
            elif path.name == "validators.jinja":
                found = in_validators(path.read_text(encoding="utf-8"))
            elif ".sh" in path.suffixes or path.name == "Makefile.jinja":
                found = in_shell(path.read_text(encoding="utf-8"))
            else:
                continue
            for line, taker, text in found:
                if SHOWN.fullmatch(taker) or "--all" in sys.argv[1:]:
                    print(f"{name}:{line}: {taker}: {' '.join(text.split())}")


if __name__ == "__main__":
    main()
