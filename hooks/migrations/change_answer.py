"""Rename a choice in a project's answers.

Copier takes the question's default, without a word, where a recorded answer is no choice any more.
This runs in the project, before an update that crosses the version which renamed the choice:

    change_answer.py .copier-answers.yml QUESTION OLD NEW
"""

import sys
from pathlib import Path

import yaml


def main(answers_file: str, question: str, old: str, new: str) -> int:
    """Put the new choice where the old one was answered; return the exit code."""
    file = Path(answers_file)
    answers = yaml.safe_load(file.read_text("utf-8"))
    answer = answers.get(question)
    if isinstance(answer, list):
        answers[question] = [new if choice == old else choice for choice in answer]
    elif answer == old:
        answers[question] = new
    # Its comment comes back with the update, which writes this file again.
    file.write_text(yaml.safe_dump(answers, allow_unicode=True, sort_keys=False), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
