"""Look for the phrases of scripts/phrases.yml in this repository's text, code and comments.

    python scripts/words.py [FILE ...]

Without files, it reads the files that git tracks or could add. It prints a line for each phrase
that it finds: the place, the phrase, and what to write instead. The exit code is 1 if it finds any.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_name("phrases.yml")
READ = re.compile(r"\.(def|jinja|lua|md|ps1|py|sbatch|sh|toml|ya?ml)$|(^|/)(Makefile|run)$")
# Generated files, licenses, and the files about the phrases.
SKIP = re.compile(
    r"^tests/render/golden/|^benchmarks/results/|(^|/)LICENSE|/phrases\.yml$|/test_words\.py$"
)

# A line break in a sentence, with the quotation marks of adjacent strings or the mark of a comment.
BREAK = re.compile(r"""[ \t"'\\]*\n[ \t]*(?:[#>]+ ?)?[ \t]*(?:[bfr]{,2}["'])?""")
# Not checked in Markdown: blocks of code, and text between these two comments.
UNCHECKED = re.compile(
    r"^ *(```+|~~~+).*?^ *\1|<!-- words: off -->.*?<!-- words: on -->", re.MULTILINE | re.DOTALL
)


class Rule(NamedTuple):
    """A phrase that must not be written.

    Attributes:
        find: the pattern of the phrase; a space in it also matches a line break.
        write: what to write instead.
        before: a sentence with the phrase.
        after: the sentence in better words.
    """

    find: re.Pattern[str]
    write: str
    before: str
    after: str


class Hit(NamedTuple):
    """A phrase that was found: its line, counted from 1, the phrase, and what to write instead."""

    line: int
    phrase: str
    write: str


def rules() -> list[Rule]:
    """Return the rules of scripts/phrases.yml."""
    return [
        Rule(re.compile(rule.pop("find").replace(" ", "[ \n]"), re.IGNORECASE), **rule)
        for rule in yaml.safe_load(LIST.read_text("utf-8"))
    ]


def check(text: str, rules: list[Rule], markdown: bool = False) -> list[Hit]:
    """Return the phrases in a text, by line."""
    if markdown:
        text = UNCHECKED.sub(lambda found: "\n" * found[0].count("\n"), text)
    text = BREAK.sub("\n", text)
    return sorted(
        Hit(text.count("\n", 0, found.start()) + 1, found[0].replace("\n", " "), rule.write)
        for rule in rules
        for found in rule.find.finditer(text)
    )


def files() -> Iterator[str]:
    """Yield the files to check, as paths from the repository's root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in sorted(set(listed.split("\0"))):
        if READ.search(name) and not SKIP.search(name) and (ROOT / name).is_file():
            yield name


def main(names: list[str]) -> int:
    """Check files, or all files if none is named; return the exit code."""
    known = rules()
    found = 0
    for name in names or files():
        markdown = name.removesuffix(".jinja").endswith(".md")
        for hit in check((ROOT / name).read_text("utf-8"), known, markdown):
            found += 1
            print(f"{name}:{hit.line}: {hit.phrase!r}: {hit.write}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
