"""Check a record that `make acceptance` wrote on the site of a preset; keep it in sites/records/.

    .venv/bin/python scripts/site_record.py lumi acceptance-lumi-2026-11-27.json

A record comes from a stranger. It is right if the template's own code, which lets only known words
and versions into a record, makes the same record of it again. docs/sites.md shows what is kept.
"""

import json
import runpy
import sys
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RECORD = runpy.run_path(f"{ROOT}/template/src/{{{{ package_name }}}}/tools/acceptance/record.py")


def read(file: Path) -> dict[str, Any]:
    """Return the record in a file.

    Raises:
        OSError: the file can't be read.
        ValueError: it is not a record.
    """
    try:
        found = json.loads(file.read_bytes())
        right = RECORD["build"](found, found["checks"])
        date.fromisoformat(found["date"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"expected JSON with a date and a list of checks: {error!a:.100}"
        ) from None
    for sent, known in [*zip(found["checks"], right["checks"], strict=True), (found, right)]:
        for name in sent:
            if name not in known or sent[name] != known[name]:
                what = f"{name!a:.40} is {sent[name]!a:.100}"
                raise ValueError(f"{what}: expected only what `make acceptance` writes")
    if not right["checks"] or any(len(each) < len(RECORD["CHECK"]) for each in right["checks"]):
        raise ValueError(f"expected one or more checks, each with {', '.join(RECORD['CHECK'])}")
    return dict(found)


def main(preset: str, file: str) -> None:
    """Check a record and keep it; exit with one line if it is not right."""
    if not (ROOT / f"sites/{preset}.yml").exists():
        sys.exit(f"error: sites/{preset}.yml is missing: name a preset of sites/, without .yml")
    try:
        record = read(Path(file))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {file} is not a record of a site: {error}")
    kept = ROOT / f"sites/records/{preset}.json"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    print(f"kept as {kept}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("error: expected: site_record.py PRESET FILE")
    main(*sys.argv[1:])
