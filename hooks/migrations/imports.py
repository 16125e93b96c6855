"""Rewrite the imports of modules that moved. The rest of a file stays the same, byte for byte."""

import ast
import re
import symtable
from pathlib import Path

Problem = tuple[int, str, str, str]
"""An import that cannot be rewritten: its line, the old module, the name, and a hint."""
BOM = b"\xef\xbb\xbf"


class Imports:
    """The imports of a package whose modules moved. It reads the new modules when it is created.

    Args:
        package: the package's name.
        moved: by old path in the project, the new paths.
        names: names that moved to another module: `old_module.name` to `module.name`.
        gone: hints for names that were removed, by `old_module.name`.
    """

    def __init__(
        self, package: str, moved: dict[str, list[str]], names: dict[str, str], gone: dict[str, str]
    ) -> None:
        self.package, self.names, self.gone = package, names, gone
        self.moved: dict[str, list[str]] = {}
        for path, new in moved.items():
            if not path.endswith(".py") or self._package(Path(path)) is None:
                continue
            homes = [".".join(self._module(Path(each))) for each in new]
            self.moved[".".join(self._module(Path(path)))] = homes
        stay = {full.rpartition(".")[0] for full in names}
        rooms = {home for new in self.moved.values() for home in new} | (stay - set(self.moved))
        self._own = {home: self._names(home, imported=False) for home in rooms}
        self._all = {home: self._names(home, imported=True) for home in rooms}

    def rewrite(self, data: bytes, before: Path, now: Path) -> tuple[bytes, list[Problem]]:
        """Return a file with its imports rewritten, and the imports that cannot be rewritten.

        Args:
            data: the contents of the file, returned unchanged if it is not Python.
            before: its old path.
            now: its new path.
        """
        bom, data = data[: 3 * data.startswith(BOM)], data.removeprefix(BOM)
        try:
            tree = ast.parse(data)
        except (SyntaxError, ValueError):
            return bom + data, []
        starts = [0]
        for line in data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        problems: list[Problem] = []
        bound: dict[str, str] = {}  # names that the file gives to moved modules
        edits = []
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                start = starts[node.lineno - 1] + node.col_offset
                assert node.end_lineno and node.end_col_offset is not None
                end = starts[node.end_lineno - 1] + node.end_col_offset
                margin = data[starts[node.lineno - 1] : start]
                file = (self._package(before), self._package(now))
                if isinstance(node, ast.Import):
                    new = self._import(node, bound, problems)
                else:
                    new = self._import_from(node, data[start:end], margin, *file, bound, problems)
                if new:
                    edits.append((start, end, new))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = bound.get(node.value.id)
                stays = [(home, node.attr) for home in self.moved[module][:1]] if module else []
                if module and [self._place(module, node.attr)] != stays:
                    problems.append((node.lineno, module, node.attr, self._hint(module, node.attr)))
        longer = [
            (start, new.count(b"\n") - data.count(b"\n", start, end)) for start, end, new in edits
        ]
        problems = [
            (line + sum(by for start, by in longer if start < starts[line - 1]), module, name, hint)
            for line, module, name, hint in problems
        ]
        newline = b"\r\n" if b"\r\n" in data else b"\n"
        for start, end, new in sorted(edits, reverse=True):
            data = data[:start] + new.replace(b"\n", newline) + data[end:]
        return bom + data, sorted(problems)

    def _import(
        self, node: ast.Import, bound: dict[str, str], problems: list[Problem]
    ) -> bytes | None:
        """Return what to write for `import package.module as name`."""
        for each in node.names:
            module = each.name.removeprefix(f"{self.package}.")
            if module == each.name or module not in self.moved:
                continue
            homes = self.moved[module]
            if each.asname and len(homes) == len(node.names) == 1:
                bound[each.asname] = module
                return f"import {self.package}.{homes[0]} as {each.asname}".encode()
            problems.append((node.lineno, self.package, module, self._hint("", module)))
        return None

    def _import_from(
        self,
        node: ast.ImportFrom,
        text: bytes,
        margin: bytes,
        before: tuple[str, ...] | None,
        now: tuple[str, ...] | None,
        bound: dict[str, str],
        problems: list[Problem],
    ) -> bytes | None:
        """Return what to write for `from module import name`."""
        named = node.module.split(".") if node.module else []
        if not node.level:
            if not named or named[0] != self.package:
                return None
            module = ".".join(named[1:])
        elif before is None or node.level > len(before) + 1:
            return None
        else:
            module = ".".join([*before[: len(before) - node.level + 1], *named])
        groups: dict[str, list[str]] = {}
        for each in node.names:
            place = self._place(module, each.name)
            if place is None:
                problems.append((node.lineno, module, each.name, self._hint(module, each.name)))
                place = (module, each.name)
            full = f"{module}.{each.name}".lstrip(".")
            if full in self.moved:
                bound[each.asname or each.name] = full
            home = self._shown(place[0], now) if node.level else f"{self.package}.{place[0]}"
            shown = place[1]
            if (bound_as := each.asname or each.name) != shown or each.asname == each.name:
                shown += f" as {bound_as}"
            groups.setdefault(home.removesuffix(".") if not node.level else home, []).append(shown)
        written = [
            f"{each.name} as {each.asname}" if each.asname else each.name for each in node.names
        ]
        if list(groups.values()) == [written]:
            (home,) = groups
            same = home == f"{'.' * node.level}{node.module or ''}"
            new = f"from {home} import".encode()
            return None if same else re.sub(rb"^from[.\w\s\\]+?\bimport\b", new, text, count=1)
        statements = [
            f"from {home} import {', '.join(some)}".encode() for home, some in groups.items()
        ]
        comments = re.findall(rb"#[^\r\n]*", text)
        if margin.strip():
            return b"  ".join([b"; ".join(statements), *comments])
        return (b"\n" + margin).join([*comments, *statements])

    def _place(self, module: str, name: str) -> tuple[str, str] | None:
        """Return the new module of a name and its name there; None if there is no single one."""
        full = f"{module}.{name}".lstrip(".")
        if full in self.gone:  # also where a new module has the name, for something else
            return None
        if full in self.moved:
            if len(self.moved[full]) != 1:
                return None
            parent, _, last = self.moved[full][0].rpartition(".")
            return parent, last
        if module not in self.moved and full not in self.names:
            return module, name
        homes = self.moved.get(module, [module])
        if name == "*" and len(homes) == 1:
            return homes[0], name
        for known in (self._own, self._all):
            for home in homes:
                if name in known[home]:
                    return home, name
        if full in self.names:
            parent, _, last = self.names[full].rpartition(".")
            return parent, last
        return None

    def _hint(self, module: str, name: str) -> str:
        """Return a hint about a name whose import cannot be rewritten."""
        full = f"{module}.{name}".lstrip(".")
        if (
            now := self.gone.get(full)
            or self.names.get(full)
            or ", ".join(self.moved.get(full, []))
        ):
            return f"is now {now}"
        homes = self.moved[full] if full in self.moved else self.moved.get(module, [module])
        if not homes:
            return "is gone, and nothing takes its place"
        return f"is not in {', '.join(homes)}, where that module is now"

    def _names(self, module: str, imported: bool) -> set[str]:
        """Return the names that a module of the new version has; none if the module is missing."""
        path = Path("src", self.package, *module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.is_file():
            return set()
        try:
            table = symtable.symtable(file.read_text("utf-8"), str(file), "exec")
        except (SyntaxError, ValueError):  # the conflicts of an update, another encoding
            return set()
        return {
            each.get_name()
            for each in table.get_symbols()
            if (each.is_assigned() or each.is_imported()) and (imported or not each.is_imported())
        }

    def _module(self, path: Path) -> tuple[str, ...]:
        """Return the path of a module below the package, as names."""
        parts = path.with_suffix("").parts[2:]
        return parts[:-1] if parts[-1] == "__init__" else parts

    def _package(self, path: Path) -> tuple[str, ...] | None:
        """Return the path of a file's folder below the package, as names; None outside of it."""
        return path.parts[2:-1] if path.parts[:2] == ("src", self.package) else None

    def _shown(self, module: str, now: tuple[str, ...] | None) -> str:
        """Return how `from` names a module inside a package."""
        here, there = list(now or ()), module.split(".") if module else []
        while here and there and here[0] == there[0]:
            here, there = here[1:], there[1:]
        return "." * (len(here) + 1) + ".".join(there)
