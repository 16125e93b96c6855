"""Checks a CITATION.cff of the template against the Citation File Format 1.2.0.

Its schema is schema.json of https://github.com/citation-file-format/citation-file-format, 1.2.0.
"""

import re

import yaml

EMAIL = r"^\S+@\S+\.\S{2,}$"
REQUIRED = {"cff-version", "message", "title", "authors"}
ALLOWED = REQUIRED | {"abstract", "license", "type"}
LICENSES = {"MIT", "BSD-3-Clause", "Apache-2.0"}


def check_citation(text: str) -> None:
    """Check a CITATION.cff.

    Raises:
        AssertionError: it breaks a rule of the format.
    """
    cited = yaml.safe_load(text)
    assert cited.keys() >= REQUIRED and cited.keys() <= ALLOWED, cited
    # Without quotes, YAML would read 1.2 as a number.
    assert cited["cff-version"] == "1.2.0" and cited.get("type", "software") == "software"
    (author,) = cited["authors"]
    assert author.keys() >= {"name"} and author.keys() <= {"name", "email"}, author
    said = (cited["message"], cited["title"], author["name"], cited.get("abstract", "-"))
    assert all(isinstance(words, str) and words for words in said), cited
    assert re.search(EMAIL, author.get("email", "ada@example.org")), author
    assert cited.get("license", "MIT") in LICENSES, cited
