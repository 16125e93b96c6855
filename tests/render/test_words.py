"""`make lint` finds each phrase of scripts/phrases.yml, and nothing in better words."""

import re

import pytest

from scripts.words import ROOT, Rule, check, rules

RULES = rules()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.before)
def test_a_phrase_is_found_and_its_correction_is_not(rule: Rule) -> None:
    assert [hit.write for hit in check(rule.before, RULES)] == [rule.write]
    assert not check(rule.after, RULES)


def test_a_phrase_may_go_over_a_line_break() -> None:
    for text in (
        "for\never",
        "# it waits for\n# ever",
        '    print(\n        "for "\n        f"ever {seconds}"\n    )',
        "> for\n> ever",
    ):
        (hit,) = check(text, RULES)
        assert hit.phrase == "for ever"
        assert "for" in text.splitlines()[hit.line - 1]
    assert not check("for\n\never", RULES), "two paragraphs"


def test_code_in_markdown_is_left_alone() -> None:
    code = "```text\nin vain\n```\n"
    table = "<!-- words: off -->\nin vain\n<!-- words: on -->\n"
    text = f"In vain.\n{code}{table}\nin vain\n"
    assert [hit.line for hit in check(text, RULES, markdown=True)] == [1, 9]
    assert [hit.line for hit in check(text, RULES)] == [1, 3, 6, 9]


def test_the_corrections_in_contributing_have_no_phrase() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = text.partition("<!-- words: off -->")[2].partition("<!-- words: on -->")[0]
    rows = re.findall(r"^\| (.*) \| (.*) \|$", table, re.MULTILINE)[1:]
    assert len(rows) == 20
    assert not [hit for _, after in rows for hit in check(after, RULES)]
