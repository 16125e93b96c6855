"""Keep a record of `make test-gpu` in docs/gpu/, and write all records into docs/gpu.md.

    .venv/bin/python scripts/gpu_record.py gpu.json

A record comes from a stranger: it may have nothing that changes the page, such as a link.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, RECORDS = ROOT / "docs/gpu.md", ROOT / "docs/gpu"
BEGIN, END = "<!-- made by scripts/gpu_record.py -->", "<!-- end of what it made -->"
STRANGE = re.compile(r"[^\w\s\"{}\[\]:,.;()'=+%/-]|\]\s*\(|://|www\.", re.ASCII)
WORD, DAY = re.compile(r"[\w .,+/()-]{1,60}", re.ASCII), re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
WRONG = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
HEAD = ("date", "gpu", "gpus", "torch", "cuda", "nccl", "driver")


def read(file: Path) -> dict[str, Any]:
    """Return the record in a file.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not a record, or has been made without a GPU.
    """
    text = file.read_text("utf-8")
    if strange := STRANGE.search(text):
        raise ValueError(f"unexpected {strange[0]!a}")
    try:
        record: dict[str, Any] = json.loads(text)
        tables([record])
        words = [str(record["machine"][name]) for name in HEAD]
        right = DAY.fullmatch(words[0]) and all(map(WORD.fullmatch, words))
    except WRONG as error:
        raise ValueError(f"expected what `make test-gpu` writes on a GPU: {error!a:.100}") from None
    if not right:
        raise ValueError(f"unexpected date or words of the machine: {words!a:.200}")
    return record


def tables(records: list[dict[str, Any]]) -> str:
    """Return the tables of the machines, of what passed and of the figures, in Markdown."""
    if not records:
        return "Nobody has sent a record yet. The next section has what ran before there were any."
    machines = [[str(record["machine"][name]) for name in HEAD] for record in records]
    columns = [f"{day}, {gpu}" for day, gpu, *_ in machines]
    outcomes = [passed(record["tests"]) for record in records]
    values = [
        {
            f"{name} [{each['unit']}]" if each["unit"] else name: f"{float(each['value']):,.4g}"
            for name, each in record["figures"].items()
        }
        for record in records
    ]
    return "\n\n".join(
        [
            table(["date", "GPU", "GPUs", "PyTorch", "CUDA", "NCCL", "driver"], machines),
            table(["what", *columns], compared(outcomes)),
            table(["figure", *columns], compared(values)),
        ]
    )


def passed(tests: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return by the name of a test how many of its cases passed, and why others did not."""
    found: dict[str, list[dict[str, str]]] = {}
    for name, outcome in tests.items():
        what = name.partition("[")[0].removeprefix("test_").replace("_", " ")
        found.setdefault(what, []).append(outcome)
    return {what: summary(outcomes) for what, outcomes in found.items()}


def summary(outcomes: list[dict[str, str]]) -> str:
    """Return the outcomes of a test's cases: "passed", or "2 passed, 1 needs several GPUs"."""
    named = [each.get("reason") or each["outcome"] for each in outcomes]
    counts = {each: named.count(each) for each in dict.fromkeys(named)}
    if len(counts) == 1:
        return f"{named[0]} ({len(named)})" if len(named) > 1 else named[0]
    return ", ".join(f"{count} {each}" for each, count in counts.items())


def compared(columns: list[dict[str, str]]) -> list[list[str]]:
    """Return a row for each name in one of the columns, with its values."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "") for column in columns)] for name in names]


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def renewed(page: str) -> str:
    """Return the text of the page with the tables of all records, the newest first."""
    records = [read(path) for path in sorted(RECORDS.glob("*.json"), reverse=True)]
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(records)}\n\n{END}{rest.split(END)[1]}"


def main(file: str) -> None:
    """Check a record, keep it, and renew the page; exit with one line if it is not right."""
    try:
        record = read(Path(file))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {file} is not a record of GPUs: {error}")
    machine = record["machine"]
    name = re.sub(r"\W+", "-", f"{machine['date']}-{machine['gpus']}x{machine['gpu']}".lower())
    RECORDS.mkdir(exist_ok=True)
    kept = RECORDS / f"{name}.json"
    if kept.exists():
        sys.exit(f"error: {kept} exists: remove it first to replace it")
    kept.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    PAGE.write_text(renewed(PAGE.read_text("utf-8")), "utf-8")
    print(f"kept as {kept}, and shown in {PAGE}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("error: expected: gpu_record.py FILE")
    main(*sys.argv[1:])
