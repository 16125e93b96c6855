"""What a check found, and how one that breaks is kept from ending the others."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ...core.errors import UsageError

Status = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """A line of the report.

    Args:
        status: `ok`, `warning` (jobs run, but perhaps not as meant), or `error` (jobs fail).
        name: what was looked at, in a word.
        message: what was found and, unless all is well, what to do.
        nodes: the nodes that it holds for; none where it holds for all.
    """

    status: Status
    name: str
    message: str
    nodes: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{', '.join(self.nodes)}: " if self.nodes else ""
        return f"{self.status:8} {self.name:12} {where}{self.message}"


def attempt(
    name: str, check: Callable[..., Iterable[Finding]], *arguments: object
) -> Iterator[Finding]:
    """Yield what a check finds. One that raises is an error of its own, and others go on."""
    try:
        yield from check(*arguments)
    except Exception as error:
        yield Finding("error", name, describe(error))


def describe(error: Exception) -> str:
    """Return what an exception says, on one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}"
