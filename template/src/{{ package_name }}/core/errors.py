"""The errors that are answered with one line instead of a traceback."""


class UsageError(Exception):
    """A mistake in how the project is used or in what the machine offers.

    Its message is one line: what is wrong, what was expected, what to do.
    """


class LostRankError(UsageError):
    """Another rank is gone or does not answer; this one has done nothing wrong."""


def printable(text: str) -> str:
    """Return a text on one line, with what a terminal would act on spelled out."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
