"""Keep edited files that an update is about to delete.

Copier deletes a file that the new version of the template lacks, whether it was edited or not. This
compares such files with what the old version rendered, and copies each edited one to a file with
`.old` behind its name. It runs in the project, before an update across the version in question:

    keep_edited.py .copier-answers.yml 'src/*/old_name.py' ...
"""

import shutil
import sys
import tempfile
from pathlib import Path

import copier
import yaml


def main(answers_file: str, *patterns: str) -> int:
    """Keep those of the files that were edited; return the exit code."""
    paths = [path for pattern in patterns for path in sorted(Path().glob(pattern))]
    answers = yaml.safe_load(Path(answers_file).read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        copier.run_copy(
            answers["_src_path"],
            folder,
            data={name: value for name, value in answers.items() if not name.startswith("_")},
            vcs_ref=answers["_commit"],
            defaults=True,
            quiet=True,
        )
        edited = [path for path in paths if _lines(path) != _lines(Path(folder, path))]
    for path in edited:
        kept = path.with_name(f"{path.name}.old")
        if kept.exists() and _lines(kept) != _lines(path):
            print(f"error: {kept} is in the way: move it, and update again", file=sys.stderr)
            return 1
        shutil.copy2(path, kept)
        print(
            f"{path}, which you edited, is gone in the new version. Your file is kept: {kept}",
            file=sys.stderr,
        )
    return 0


def _lines(path: Path) -> list[bytes]:
    """Return a file's lines, however they end; none for a file that is not there."""
    return path.read_bytes().splitlines() if path.is_file() else []


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
