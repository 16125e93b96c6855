"""The option --note-release, for the person who makes a release."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --note-release."""
    parser.addoption(
        "--note-release", action="store_true", help="add the names of today to released.txt"
    )
