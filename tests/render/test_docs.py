"""The pages in docs/ say what the template does."""

import pytest
from questions import page
from renderer import TEMPLATE, Renderer


def test_the_page_of_questions_is_current(render: Renderer, pytestconfig: pytest.Config) -> None:
    file = TEMPLATE / "docs" / "questions.md"
    text = page(render)
    if pytestconfig.getoption("update_golden"):
        file.write_text(text, "utf-8")
    assert text == file.read_text("utf-8"), "pytest tests/render/test_docs.py --update-golden"
