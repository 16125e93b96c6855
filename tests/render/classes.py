"""Groups the files of all variants: files with the same content are a class, and one is run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from renderer import Renderer
from variants import MATRICES, Answers, Tree, complete

Files = dict[str, str]
# Each kind of class, and the test that runs all classes of this kind.
KINDS = {
    "`src/` and `configs/`": "tests/run/test_variants.py",
    "batch scripts, with the `.sh` files they source": "tests/slurm/test_every_script.py",
    "`Makefile`": "tests/run/test_every_command.py",
    "`scripts/setup.sh`": "tests/run/test_every_command.py",
    "jobs of a project's own CI": "tests/run/test_every_command.py",
    "`pyproject.toml`": "tests/run/test_every_command.py",
    "container definitions": "tests/slurm/test_every_image.py",
}
TREES, SCRIPTS, MAKEFILES, SETUPS, JOBS, PROJECTS, IMAGES = KINDS
# Files that count as equal if only the name of the package differs.
UNNAMED = {
    "Makefile": MAKEFILES,
    "scripts/setup.sh": SETUPS,
    ".github/workflows/ci.yml": JOBS,
    ".gitlab-ci.yml": JOBS,
    "container/apptainer.def": IMAGES,
    "container/release.def": IMAGES,
}


@dataclass
class Variant:
    """A project that the tests render.

    Attributes:
        number: number of the variant.
        matrix: the set of variants that contains it.
    """

    number: int
    matrix: str
    answers: Answers
    files: Files

    @property
    def package(self) -> str:
        """The name of the project's package."""
        return complete(self.answers)["package_name"]


@dataclass
class Class:
    """Files with the same content.

    Attributes:
        path: path of one of these files.
        variant: the variant that contains this file.
        count: number of variants with such a file.
    """

    path: str
    variant: Variant
    count: int = 0

    @property
    def text(self) -> str:
        """The content of the file."""
        return self.variant.files[self.path]


@dataclass
class Classes:
    """The classes of each kind, by content."""

    variants: list[Variant]
    kinds: dict[str, dict[object, Class]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kinds = {kind: {} for kind in KINDS}
        for variant in self.variants:
            for kind, path, content in contents(variant.answers, variant.files):
                self.kinds[kind].setdefault(content, Class(path, variant)).count += 1

    def of(self, kind: str) -> list[Class]:
        """Return the classes of a kind."""
        return list(self.kinds[kind].values())


def render_all(render: Renderer) -> list[Variant]:
    """Render all variants. Equal texts are stored once."""
    texts: dict[str, str] = {}
    variants: list[Variant] = []
    for name, matrix in MATRICES.items():
        for answers in matrix():
            files = {path: texts.setdefault(text, text) for path, text in render(answers).items()}
            variants.append(Variant(len(variants), name, answers, files))
    return variants


def contents(answers: Mapping[str, object], files: Files) -> Iterator[tuple[str, str, object]]:
    """Yield what can be run in a project: its kind, a path, and a key that is equal in a class."""
    package = complete(answers)["package_name"]
    yield TREES, "configs/train.yaml", Tree.of(answers)
    for path, text in files.items():
        if path.endswith(".sbatch"):
            yield SCRIPTS, path, (text, *shared(files).values())
        elif path == "pyproject.toml":
            yield PROJECTS, path, text
        elif path in UNNAMED:
            yield UNNAMED[path], path, unnamed(text, package)


def shared(files: Files) -> Files:
    """Return the shell code that a project's batch scripts share, by path."""
    return {path: text for path, text in files.items() if re.fullmatch(r"slurm/\w+\.sh", path)}


def unnamed(text: str, package: str) -> str:
    """Return a text without the name of the package."""
    return re.sub(rf"\b{package}(?=\b|-env)", "PACKAGE", text)
