"""Apptainer builds each distinct container definition, and each image passes its own %test.

The images install stand-ins with the names and modules of the real packages. test_container.py
builds one image with the real packages, and trains in it.
"""

import shutil
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest
from classes import IMAGES, PROJECTS, Class, Classes
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from renderer import SCRATCH, tomllib

from . import apptainer

AT_HAND = ("Makefile", "pyproject.toml", "constraints.txt")
MAIN = 'import sys\nassert sys.argv[1:] == ["train", "--help"]\n'


@pytest.fixture(scope="module")
def wheels(classes: Classes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a stand-in for each package that a project may need."""
    folder = tmp_path_factory.mktemp("wheels")
    modules: dict[str, list[str]] = {}
    for module, names in packages_distributions().items():
        for name in names if not module.startswith("_") else ():
            modules.setdefault(canonicalize_name(name), []).append(module)
    needed = {
        canonicalize_name(Requirement(text).name): Requirement(text).extras
        for each in classes.of(PROJECTS)
        for text in tomllib.loads(each.text)["project"]["dependencies"]
    }
    for name, extras in needed.items():
        write_wheel(folder, name, modules[name], extras)
    return folder


def write_wheel(folder: Path, name: str, modules: list[str], extras: set[str]) -> None:
    """Write a package of empty modules, in the version that the tests have."""
    release = version(name).partition("+")[0]
    stem = f"{name.replace('-', '_')}-{release}"
    info = f"{stem}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {release}"]
    files = {f"{module}/__init__.py": "" for module in modules}
    files[f"{info}/METADATA"] = "\n".join([*metadata, *(f"Provides-Extra: {x}" for x in extras)])
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in files)
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a memory disk where there is one: images are thousands of files."""
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        yield Path(name)


def build(
    each: Class, folder: Path, wheels: Path, commands: Path, target: str
) -> subprocess.CompletedProcess[str]:
    """Run `make image` or `make release` in a project; the image is a folder, which is quicker."""
    arguments = f"--sandbox --bind {wheels}:/mnt"
    if target == "image":
        arguments += f" --build-arg BOOTSTRAP=localimage --build-arg BASE={apptainer.BASE}"
        arguments += " --build-arg TORCH=torch"
    for path, text in each.variant.files.items():
        if path.startswith(("container/", "configs/")) or path in AT_HAND:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    package = folder / "src" / each.variant.package
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(MAIN)
    return subprocess.run(
        ["make", target, f"BUILD_ARGS={arguments}"],
        cwd=folder,
        env={
            "PATH": f"{commands}:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(folder),
            "APPTAINER_TMPDIR": str(folder),
        },
        capture_output=True,
        text=True,
    )


def test_every_definition_is_built(
    classes: Classes, wheels: Path, commands: Path, folder: Path
) -> None:
    definitions = classes.of(IMAGES)
    releases = [each for each in definitions if each.path.endswith("release.def")]
    assert len(definitions) > 10 and len(releases) > 1
    for number, each in enumerate(definitions):
        root = folder / str(number)
        for target in ("image", "release") if each in releases else ("image",):
            secret = root / "src" / each.variant.package / ".env"
            secret.parent.mkdir(parents=True, exist_ok=True)
            secret.write_text("WANDB_API_KEY=secret\n")
            done = build(each, root, wheels, commands, target)
            assert done.returncode == 0, (each.variant.answers, done.stdout[-2000:], done.stderr)
        image = root / f"container/{target}.sif/opt/project"
        assert image.is_dir() and not list(image.rglob(".env"))
        shutil.rmtree(root)


def test_an_image_without_a_package_is_not_built(
    classes: Classes, wheels: Path, commands: Path, folder: Path
) -> None:
    """So that the test above means something."""
    definition = next(
        each
        for each in classes.of(IMAGES)
        if each.path == "container/apptainer.def" and "import aim" in each.text
    )
    files = definition.variant.files
    without = files["pyproject.toml"].replace('    "aim', '    # "aim')
    variant = replace(definition.variant, files={**files, "pyproject.toml": without})
    definition = Class(definition.path, variant)
    done = build(definition, folder, wheels, commands, "image")
    assert done.returncode != 0 and "No module named 'aim'" in done.stderr
    assert not (folder / "container/image.sif").exists()
