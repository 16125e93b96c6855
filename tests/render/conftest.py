"""A renderer for the tests of this folder, and a setting for the golden files."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from renderer import Renderer, copy_template


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --update-golden."""
    parser.addoption("--update-golden", action="store_true", help="write the golden files again")


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the template without its history."""
    return copy_template(tmp_path_factory.mktemp("source") / "template")


@pytest.fixture(scope="session")
def render(template: Path) -> Renderer:
    """A function that renders answers to files."""
    return Renderer(template)


@pytest.fixture(scope="session", autouse=True)
def _no_settings_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the defaults in ~/.config/copier and the user's cache out of the tests."""
    folder = tmp_path_factory.mktemp("copier")
    (folder / "settings.yml").write_text("{}\n")
    names = {
        "COPIER_SETTINGS_PATH": str(folder / "settings.yml"),
        "COPIER_CACHE_DIR": str(folder / "cache"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def tool() -> Iterator[dict[str, str]]:
    """Paths of the linters in the test environment."""
    here = Path(sys.executable).parent
    yield {
        name: shutil.which(name, path=f"{here}{os.pathsep}{os.environ['PATH']}") or name
        for name in ("ruff", "shellcheck", "copier")
    }
