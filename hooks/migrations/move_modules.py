"""Keep the user's edits when the template moves its files.

Copier deletes each file that the new version of the template lacks, even if it was edited, and
overwrites files that git ignores. This program runs in the project before and after an update that
crosses the version of the move:

    move_modules.py .copier-answers.yml before|after TABLE

Before the update, it saves the files that move and those that git ignores in the git folder: the
user's files, and the same files as the old version rendered them. After the update, it merges each
edited file into its new file, as git does. An edited file that was split, merged with others, or
removed becomes `<name>.old`. Imports of moved modules are rewritten. A line on stderr names each
file that was changed. TABLE, a file in the folder of this one, lists the moves.
"""

import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import copier
import yaml
from imports import Imports, Problem

LABELS = ("before updating", "last update", "after updating")  # the same as Copier's


def main(answers_file: str, stage: str, table_file: str) -> int:
    """Run one of the two stages; return the exit code."""
    answers = yaml.safe_load(Path(answers_file).read_text("utf-8"))
    text = Path(__file__).with_name(table_file).read_text("utf-8")
    table = yaml.safe_load(text.replace("*/", f"{answers['package_name']}/"))
    kept = Path(_git("rev-parse", "--absolute-git-dir"), "copier-moved-files")
    if stage == "before":
        if (kept / "ignored").is_dir():
            sys.exit(
                f"error: {kept}/ignored has files that git ignores, from an interrupted "
                f"update: copy what you need, remove {kept}, and update again"
            )
        keep(answers, table["paths"], kept)
    elif kept.is_dir():
        try:
            carry(answers["package_name"], table, kept)
        except BaseException:
            _say(f"error: the merge stopped; {kept} has your files from before the update")
            raise
        if (kept / "ignored").is_dir():
            last = kept.with_name("copier-ignored-files")
            shutil.rmtree(last, ignore_errors=True)
            (kept / "ignored").rename(last)
            _say(f"{last} has the files that git ignores, as they were: an undo leaves them out")
        shutil.rmtree(kept)
    return 0


def keep(answers: dict[str, object], paths: dict[str, str], kept: Path) -> None:
    """Save the files that will move and those that git ignores, and their old versions.

    Copier updates only a clean project, so git ignores each file that it does not track.
    """
    shutil.rmtree(kept, ignore_errors=True)
    tracked = {*_git("-c", "core.quotePath=true", "ls-files").splitlines()}
    with tempfile.TemporaryDirectory() as folder:
        copier.run_copy(
            str(answers["_src_path"]),
            folder,
            data={name: value for name, value in answers.items() if not name.startswith("_")},
            vcs_ref=str(answers["_commit"]),
            defaults=True,
            quiet=True,
        )
        old = {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}
        ignored = (old | _of_template(str(answers["package_name"]))) - tracked
        for root, name, some in (
            (Path(folder), "base", old & (ignored | paths.keys())),
            (Path(), "mine", old & paths.keys()),
            (Path(), "ignored", ignored),
        ):
            for path in some:
                if (root / path).is_file():
                    (kept / name / path).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(root / path, kept / name / path)


def _of_template(package: str) -> set[str]:
    """Return the paths that the new version renders, with any answers."""
    root = Path(__file__).parents[2] / "template"
    paths = (str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
    return {path.removesuffix(".jinja").replace("{{ package_name }}", package) for path in paths}


def carry(package: str, table: dict[str, dict[str, str]], kept: Path) -> None:
    """Merge the edits of moved files into the new files, and rewrite imports."""
    paths = {path: new.split() for path, new in table["paths"].items()}
    moved = {path: new for path, new in paths.items() if (kept / "base" / path).is_file()}
    imports = Imports(package, moved, table.get("names", {}), table.get("gone", {}))
    sources = Counter(new[0] for new in moved.values() if len(new) == 1)
    for path, new in moved.items():
        mine, base = kept / "mine" / path, kept / "base" / path
        there = [each for each in new if Path(each).is_file()]
        # A module made of several files, or one that existed before, replaces none of them.
        alone = len(new) == 1 == len(there) == sources[new[0]] and not _git("ls-files", new[0])
        if not mine.is_file():
            _stay_deleted(path, there, alone)
        elif alone:
            now = Path(new[0])
            if _executable(mine) != _executable(base):
                now.chmod(mine.stat().st_mode)
            if _lines(mine) != _lines(base):
                _merge(imports, path, now, mine, _lines(base))
        elif _lines(mine) != _lines(base):
            has = f"{', '.join(there)} has its contents" if there else "nothing replaces it"
            _say(f"{path}, which you edited, is gone; your file is {_old(path, mine)}, and {has}")
    for file in sorted((kept / "ignored").rglob("*")):
        path = str(file.relative_to(kept / "ignored"))
        if file.is_file() and path not in moved:
            _keep_ignored(imports, path, file, kept / "base" / path)
    for root in ("src", "tests"):
        for file in sorted(Path(root).rglob("*.py")):
            data = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
            if b"\n<<<<<<< " in data:
                continue
            result, problems = imports.rewrite(data, file, file)
            _name(problems, file)
            if result != data:
                file.write_bytes(result)
                _say(f"{file}: its imports now name the new modules")


def _keep_ignored(imports: Imports, path: str, mine: Path, base: Path) -> None:
    """Restore a file that git ignores, after Copier overwrote or deleted it."""
    now = Path(path)
    if not now.is_file():
        now.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(mine, now)
        _say(f"{path}, which git ignores, is restored: the update deleted it")
    elif _lines(mine) == _lines(now):
        return
    elif not base.is_file():
        _say(f"{path}, which git ignores, is now the template's; your file is {_old(path, mine)}")
    elif _lines(mine) != _lines(base):
        _merge(imports, path, now, mine, _lines(base))


def _merge(imports: Imports, path: str, new: Path, mine: Path, base: bytes) -> None:
    """Merge the user's edits of a file into its new file."""
    was, told = imports.rewrite(base, Path(path), new)
    # Merge with LF line endings; the result gets those of the user's file.
    edited, problems = imports.rewrite(_lines(mine), Path(path), new)
    known = [problem[1:] for problem in told]
    _name([(0, *each[1:]) for each in problems if each[1:] not in known], new)
    sides = (edited, was, _lines(new))
    says = f"which you edited, is now {new}" if path != str(new) else "which git ignores, is merged"
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(number)) for number in range(3)]
        for file, side in zip(files, sides, strict=True):
            file.write_bytes(side)
        labels = [word for label in LABELS for word in ("-L", label)]
        command = ["git", "merge-file", "-p", *labels, *map(str, files)]
        done = subprocess.run(command, capture_output=True)
        if done.returncode > 127:  # an error; smaller codes count conflicts
            _say(f"{path}, {says}; git can't merge them: your file is {_old(path, mine)}")
            return
        if done.returncode and path != str(new):
            _mark_unmerged(new, [_git("hash-object", "-w", str(file)) for file in files])
    crlf = b"\r\n" in mine.read_bytes()
    new.write_bytes(done.stdout.replace(b"\n", b"\r\n") if crlf else done.stdout)
    how = "with conflicts: look for <<<<<<< in it" if done.returncode else "with your edits"
    _say(f"{path}, {says}, {how}")


def _mark_unmerged(file: Path, hashes: list[str]) -> None:
    """Record a conflict in git's index, so that `git status` shows UU."""
    shown = f"{_git('rev-parse', '--show-prefix')}{file.as_posix()}"
    stages = zip((2, 1, 3), hashes, strict=True)
    mode = "100755" if _executable(file) else "100644"
    entries = [f"{mode} {sha} {stage}\t{shown}\n" for stage, sha in stages]
    text = "".join([f"0 {'0' * len(hashes[0])}\t{shown}\n", *entries])
    subprocess.run(["git", "update-index", "--index-info"], input=text.encode(), check=True)


def _stay_deleted(path: str, there: list[str], alone: bool) -> None:
    """Delete the new file of a file that the user had deleted, if it replaces no other file."""
    if alone:
        Path(there[0]).unlink()
        _say(f"{path}, which you deleted or renamed, is now {there[0]}; it stays deleted")
    elif there:
        _say(f"{path}, which you deleted or renamed, is gone; {', '.join(there)} has its contents")


def _old(path: str, mine: Path) -> str:
    """Save the user's file under an unused name; return a text about it."""
    numbers = ["", *range(2, 100)]
    old = next(old for n in numbers if not (old := Path(f"{path}.old{n}")).exists())
    old.parent.mkdir(parents=True, exist_ok=True)  # other answers may lack the folder
    shutil.copy2(mine, old)
    return f"kept as {old}"


def _name(problems: list[Problem], file: Path) -> None:
    for line, module, name, hint in problems:
        place = f"{file}:{line}" if line else str(file)
        _say(f"{place}: {name} of {module} {hint}: change this by hand")


def _lines(path: Path) -> bytes:
    """Return the contents of a file, with LF line endings."""
    return path.read_bytes().replace(b"\r\n", b"\n")


def _executable(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o100)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=True)
    return done.stdout.rstrip("\n")


def _say(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
