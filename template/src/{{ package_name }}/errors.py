"""The error that is answered with one line instead of a traceback."""


class UsageError(Exception):
    """A mistake in how the project is used or in what the machine offers.

    Its message is one line: what is wrong, what was expected, what to do.
    """
