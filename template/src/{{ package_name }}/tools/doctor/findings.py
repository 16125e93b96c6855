"""Findings of checks. `attempt` turns an exception into a finding, so that other checks go on."""

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from ...engine.errors import UsageError

Status = Literal["ok", "warning", "error"]


class Finding(NamedTuple):
    """A line of the report.

    Attributes:
        status: `ok`, `warning` (jobs run, but perhaps not as intended), or `error` (jobs fail).
        name: the subject, in a word or two.
        message: the facts and, unless the status is `ok`, what to do.
    """

    status: Status
    name: str
    message: str

    def __str__(self) -> str:
        return f"{self.status:8} {self.name:12} {self.message}"


def attempt(
    name: str, check: Callable[..., Iterable[Finding]], *arguments: object
) -> Iterator[Finding]:
    """Yield the findings of a check. If it raises an exception, yield an error with this name."""
    try:
        yield from check(*arguments)
    except Exception as error:
        yield Finding("error", name, describe(error))


def describe(error: Exception) -> str:
    """Return an exception as one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}"
