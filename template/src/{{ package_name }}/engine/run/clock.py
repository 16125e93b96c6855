"""Measures how the wall time of this process is divided between parts of the training."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal, get_args

Part = Literal[
    "starting", "meeting", "steps", "data", "validation", "checkpoints", "profile", "ending"
]
"""`meeting`: the rank waits for the other ranks at the start. `data`: it waits for batches.
`profile`: it writes a profile."""
PARTS: tuple[Part, ...] = get_args(Part)


class Clock:
    """Adds up the seconds of each part. At any time, exactly one part runs.

    Attributes:
        part: the part that runs now.
        since: when it began, as a time of `time.perf_counter`.
        seconds: by part, without the time of the current part since it began.
        marks: functions that take the name of what is done, such as "forward", and return a context
            for the time of it. Plug-ins add them.
    """

    def __init__(self) -> None:
        self.part: Part = "starting"
        self.since = time.perf_counter()
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.marks: list[Callable[[str], AbstractContextManager[Any]]] = []

    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that enters those of all marks."""
        if not self.marks:
            return nullcontext()
        stack = ExitStack()
        for each in list(self.marks):
            stack.enter_context(each(name))
        return stack

    def switch(self, part: Part) -> Part:
        """Begin a part; return the part that ends."""
        before, now = self.part, time.perf_counter()
        self.seconds[before] += now - self.since
        self.part, self.since = part, now
        return before

    @contextmanager
    def during(self, part: Part) -> Iterator[None]:
        """Count the time inside the context as this part."""
        before = self.switch(part)
        try:
            with self.mark(part):
                yield
        finally:
            self.switch(before)

    @property
    def trained(self) -> float:
        """The seconds of all steps until now, with the wait for their data."""
        seconds = self.read()
        return seconds["steps"] + seconds["data"]

    def read(self) -> dict[str, float]:
        """Return the seconds of each part until now; any thread may call this."""
        now = time.perf_counter() - self.since
        return {name: each + now * (name == self.part) for name, each in self.seconds.items()}


CLOCK = Clock()
