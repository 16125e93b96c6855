"""Rename a choice in a project's answers.

If a recorded answer is no longer a choice, Copier silently uses the question's default. This
program runs in the project, before an update that crosses the version which renamed the choice:

    change_answer.py .copier-answers.yml QUESTION OLD NEW
"""

import sys
from pathlib import Path

import yaml


def main(answers_file: str, question: str, old: str, new: str) -> int:
    """Replace the old choice by the new one; return the exit code."""
    file = Path(answers_file)
    answers = yaml.safe_load(file.read_text("utf-8"))
    answer = answers.get(question)
    if isinstance(answer, list):
        answers[question] = [new if choice == old else choice for choice in answer]
    elif answer == old:
        answers[question] = new
    # This drops the comment of the file; the update writes it again.
    file.write_text(yaml.safe_dump(answers, allow_unicode=True, sort_keys=False), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
