"""Prints which lines of a rendered project the tests ran, and which not. `make coverage` calls it.

Each Python process and each bash of the tests recorded the lines that it ran, also those of jobs
and ranks. A process that a signal killed could not. A file of a rendered project counts as the
template's file that it was copied from, unless a test changed it. The modules that depend on the
example (data, figures, mnist, model, settings) are left out, because tests edit them.
"""

import os
import re
import sys
from collections import defaultdict
from pathlib import Path

from coverage import Coverage, CoverageData

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "template/src/{{ package_name }}"
TRACED = re.compile(r"^\++ (\S+):(\S*slurm/\w+\.sh):(\d+) ")
# Lines of bash that are not commands.
NO_COMMAND = re.compile(r"\s*($|#|(fi|done|else|esac|\}|;;)\s*$|[\w-]+\(\) \{|[^()]*\)$)")
# The lines of a text that a command reads.
HERE = re.compile(r"(?<=<<END)\n.*?^ *END$", re.DOTALL | re.MULTILINE)


def python_lines(folder: Path) -> dict[str, set[int]]:
    """Return the numbers of the lines that were run, for each module of the template."""
    lines: dict[str, set[int]] = defaultdict(set)
    for path in folder.glob("python.*"):
        data = CoverageData(str(path))
        data.read()
        for rendered in map(Path, data.measured_files()):
            inside = str(rendered).rpartition("/src/")[2].partition("/")[2]
            ours = PACKAGE / inside
            if ours.is_file() and rendered.is_file() and rendered.read_bytes() == ours.read_bytes():
                lines[str(ours)].update(data.lines(str(rendered)) or ())
    return lines


def bash_lines(folder: Path) -> dict[str, bool]:
    """Return the commands in all renders of slurm/*.sh, and whether any render ran each of them."""
    ran: dict[Path, set[int]] = defaultdict(set)
    for path in folder.glob("bash.*"):
        for line in path.read_text(errors="replace").splitlines():
            if traced := TRACED.match(line):
                ran[Path(traced[1], traced[2])].add(int(traced[3]))
    commands: dict[str, bool] = {}
    for source, numbers in ran.items():
        if source.is_file():
            text = HERE.sub(lambda found: "\n" * found[0].count("\n"), source.read_text())
            continued = False
            for number, line in enumerate(text.splitlines(), 1):
                if not continued and not NO_COMMAND.match(line):
                    commands[line.strip()] = commands.get(line.strip(), False) or number in numbers
                continued = line.endswith("\\")
    return commands


def main() -> None:
    """Print the report."""
    folder = Path(os.environ["COVERAGE_FOLDER"])
    data = CoverageData(str(folder / "all"))
    data.add_lines({str(path): () for path in PACKAGE.rglob("*.py")})
    data.add_lines(python_lines(folder))
    data.write()
    merged = Coverage(data_file=str(folder / "all"), config_file=False)
    merged.load()
    os.chdir(PACKAGE)
    merged.report(show_missing=True, skip_covered=True)
    commands = bash_lines(folder)
    print(f"\nslurm/*.sh: {sum(commands.values())} of {len(commands)} commands; not:")
    print("\n".join(f"    {command}" for command, ran in commands.items() if not ran))


if __name__ == "__main__":
    sys.exit(main())
