"""Take the edits of a project along when the template moves its files.

Copier deletes a file that the new version of the template lacks, whether it was edited or not. This
runs in the project twice, before and after an update across the version in question:

    move_modules.py .copier-answers.yml before|after TABLE

Before, it keeps the files that moved, as they are and as the old version rendered them, in the git
folder. After, it merges each edited one into the file that took its place, as git does. An edited
file that was split, or has gone, becomes `<name>.old`. Imports of modules that moved follow them. A
line on stderr names each file that this concerns. TABLE, beside this file, says what moved.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import copier
import yaml
from imports import Imports, Problem

LABELS = ("before updating", "last update", "after updating")  # Copier's own


def main(answers_file: str, stage: str, table_file: str) -> int:
    """Run one of the two stages; return the exit code."""
    answers = yaml.safe_load(Path(answers_file).read_text("utf-8"))
    text = Path(__file__).with_name(table_file).read_text("utf-8")
    table = yaml.safe_load(text.replace("*/", f"{answers['package_name']}/"))
    kept = Path(_git("rev-parse", "--absolute-git-dir"), "copier-moved-files")
    if stage == "before":
        keep(answers, table["paths"], kept)
    elif kept.is_dir():
        carry(answers["package_name"], table, kept)
        shutil.rmtree(kept)
    return 0


def keep(answers: dict[str, object], paths: dict[str, str], kept: Path) -> None:
    """Keep the files that will move: the user's, and what the old version rendered."""
    shutil.rmtree(kept, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        copier.run_copy(
            str(answers["_src_path"]),
            folder,
            data={name: value for name, value in answers.items() if not name.startswith("_")},
            vcs_ref=str(answers["_commit"]),
            defaults=True,
            quiet=True,
        )
        for path in paths:
            for root, name in ((Path(folder), "base"), (Path(), "mine")):
                if Path(folder, path).is_file() and (root / path).is_file():
                    (kept / name / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / path, kept / name / path)


def carry(package: str, table: dict[str, dict[str, str]], kept: Path) -> None:
    """Bring the edits of moved files to where these are now, and imports to what they import."""
    paths = {path: new.split() for path, new in table["paths"].items()}
    moved = {path: new for path, new in paths.items() if (kept / "base" / path).is_file()}
    imports = Imports(package, moved, table.get("names", {}), table.get("gone", {}))
    for path, new in moved.items():
        mine = kept / "mine" / path
        base = _lines(kept / "base" / path)
        if not mine.is_file():
            _stay_deleted(path, new)
        elif _lines(mine) != base and len(new) == 1 and Path(new[0]).is_file():
            _merge(imports, path, Path(new[0]), mine.read_bytes(), base)
        elif _lines(mine) != base:
            old = _free(path)
            shutil.copy2(mine, old)
            now = f"what it had is now in {', '.join(new)}" if new else "nothing takes its place"
            _say(f"{path}, which you edited, is gone; your file is kept as {old}, and {now}")
    for root in ("src", "tests"):
        for file in sorted(Path(root).rglob("*.py")):
            data = file.read_bytes()
            if b"\n<<<<<<< " in data:
                continue
            result, problems = imports.rewrite(data, file, file)
            _name(problems, file)
            if result != data:
                file.write_bytes(result)
                _say(f"{file}: its imports follow the modules that moved")


def _merge(imports: Imports, path: str, new: Path, mine: bytes, base: bytes) -> None:
    """Merge the user's edits of a file into the one that took its place."""
    ours = new.read_bytes()
    was, told = imports.rewrite(base, Path(path), new)
    # All ends of lines are git's, and at the end the user's.
    edited, problems = imports.rewrite(mine.replace(b"\r\n", b"\n"), Path(path), new)
    known = [problem[1:] for problem in told]
    _name([(0, *each[1:]) for each in problems if each[1:] not in known], new)
    sides = (edited, was, ours)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(number)) for number in range(3)]
        for file, side in zip(files, sides, strict=True):
            file.write_bytes(side)
        labels = [word for label in LABELS for word in ("-L", label)]
        command = ["git", "merge-file", "-p", *labels, *map(str, files)]
        done = subprocess.run(command, capture_output=True)
        if done.returncode > 127:  # not the number of conflicts: git could not
            (old := _free(path)).write_bytes(mine)
            _say(f"{path}, which you edited, is now {new}; git can't merge them: see {old}")
            return
        if done.returncode:
            _mark_unmerged(new, [_git("hash-object", "-w", str(file)) for file in files])
    result = done.stdout.replace(b"\n", b"\r\n") if b"\r\n" in mine else done.stdout
    new.write_bytes(result)
    how = "with conflicts: look for <<<<<<< in it" if done.returncode else "with your edits"
    _say(f"{path}, which you edited, is now {new}, {how}")


def _mark_unmerged(file: Path, hashes: list[str]) -> None:
    """Tell git's index of a conflict, so that `git status` says UU."""
    shown = f"{_git('rev-parse', '--show-prefix')}{file.as_posix()}"
    stages = zip((2, 1, 3), hashes, strict=True)
    entries = [f"100644 {sha} {stage}\t{shown}\n" for stage, sha in stages]
    text = "".join([f"0 {'0' * len(hashes[0])}\t{shown}\n", *entries])
    subprocess.run(["git", "update-index", "--index-info"], input=text.encode(), check=True)


def _stay_deleted(path: str, new: list[str]) -> None:
    """Delete what took the place of a file that the user had deleted."""
    if len(new) == 1 and Path(new[0]).is_file():
        Path(new[0]).unlink()
        _say(f"{path}, which you deleted or renamed, is now {new[0]}; it stays deleted")
    elif new:
        _say(f"{path}, which you deleted or renamed, was split; it is back as {', '.join(new)}")


def _free(path: str) -> Path:
    """Return a name for a kept file that no file has."""
    numbers = ["", *range(2, 100)]
    return next(old for n in numbers if not (old := Path(f"{path}.old{n}")).exists())


def _name(problems: list[Problem], file: Path) -> None:
    for line, module, name, hint in problems:
        place = f"{file}:{line}" if line else str(file)
        _say(f"{place}: {name} of {module} {hint}: change this by hand")


def _lines(path: Path) -> bytes:
    """Return what a file has, with the ends of lines that git has."""
    return path.read_bytes().replace(b"\r\n", b"\n")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
