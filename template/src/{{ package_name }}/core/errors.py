"""The errors that are answered with one line instead of a traceback, and how lines are shown."""

import logging


class UsageError(Exception):
    """A mistake in how the project is used or in what the machine offers.

    Its message is one line: what is wrong, what was expected, what to do.
    """


class LostRankError(UsageError):
    """Another rank is gone or does not answer; this one has done nothing wrong."""


class PrintableFormatter(logging.Formatter):
    """Spells out what a terminal would act on: a log may quote another user's file."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without its traceback."""
        record.message = printable(record.message)
        return super().formatMessage(record)


def printable(text: str) -> str:
    """Return a text on one line, with what a terminal would act on spelled out."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
