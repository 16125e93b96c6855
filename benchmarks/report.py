"""Writes what was measured into README.md, and draws it: `python -m benchmarks.report`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import plots
from .compare import Comparison, short
from .growth import Growth

README = Path(__file__).parent / "README.md"
RESULTS = Path(__file__).parent / "results"
BEGIN, END = "<!-- {} made by report.py -->", "<!-- the end of what report.py made -->"


def write() -> None:
    """Draw all results, and replace the tables in README.md."""
    for path in sorted(RESULTS.glob("*.json")):
        plots.main([str(path)])
    README.write_text(renewed(README.read_text("utf-8")), "utf-8")


def renewed(readme: str) -> str:
    """Return the text of README.md with new tables of all results."""
    results = {path.stem: load(path) for path in sorted(RESULTS.glob("*.json"))}
    made = {
        "ratios": [table(name, each) for name, each in results.items()],
        "growth": [growth(each) for each in results.values()],
    }
    for name, tables in made.items():
        begin = BEGIN.format(name)
        before, rest = readme.split(begin)
        _, after = rest.split(END, 1)
        readme = "\n\n".join([before + begin, *filter(None, tables), END + after])
    return readme


def load(path: Path) -> dict[str, Any]:
    """Return the content of a file of results."""
    return json.loads(path.read_text("utf-8"))


def table(name: str, results: Mapping[str, Any]) -> str:
    """Return one table of all ratios that were measured on a machine."""
    machine = results["machine"]
    gpu = f"{machine['gpu']}, " if "gpu" in machine else ""
    rows = [Comparison(**each) for each in results["comparisons"].values() if "baseline" in each]
    lines = [
        f"**{name}**: {gpu}{machine['processor']}, {machine['cores']} cores, "
        f"Python {machine['python']}, PyTorch {machine['torch']}, "
        f"{' and '.join(sorted({each.date for each in rows}))}",
        "",
        f"![Ratios of this project and other programs]({RESULTS.name}/{name}-ratios.png)",
        "",
        "| | this project | baseline | ratio | target | ratios of the others |",
        "|---|--:|--:|--:|---|---|",
    ]
    return "\n".join([*lines, *map(row, rows)])


def growth(results: Mapping[str, Any]) -> str:
    """Return a table for each list of world sizes: the first size and the last two."""
    grown = [Growth(**each) for each in results["comparisons"].values() if "sizes" in each]
    tables: dict[tuple[int, ...], list[str]] = {}
    for each in grown:
        sizes = (each.sizes[0], *each.sizes[-2:])
        head = [f"| of one rank | {' | '.join(f'{n:,} ranks' for n in sizes)} | exponent |"]
        lines = tables.setdefault(sizes, [*head, "|---|--:|--:|--:|--:|"])
        for name, exponent in each.exponents.items():
            values = (each.figures[name][0], *each.figures[name][-2:])
            shown = " | ".join(f"{short(value)} {each.unit}" for value in values)
            what = f"{each.title.removeprefix('Growth: ')}: {name}"
            lines.append(f"| {what} | {shown} | {round(exponent, 1) + 0:.1f} |")
    return "\n\n".join("\n".join(lines) for lines in tables.values())


def row(comparison: Comparison) -> str:
    """Return the row of a comparison, whose first contestant is this project."""
    medians, ratios = comparison.medians, comparison.ratios
    mine, *names = medians
    others = [f"{name} {ratios[name]:.2f}" for name in names if name != comparison.baseline]
    verdict = {True: "; met", False: "; **not met**", None: ""}[comparison.met]
    return " | ".join(
        [
            f"| {comparison.title}",
            f"{short(medians[mine])} {comparison.unit}",
            f"{comparison.baseline}: {short(medians[comparison.baseline])}",
            f"{ratios[mine]:.2f}",
            f"{comparison.target}{verdict}",
            f"{', '.join(others)} |",
        ]
    )


if __name__ == "__main__":
    write()
