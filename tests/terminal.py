"""A terminal in which a test, or scripts/record.py, types as a person would."""

import os
import re

import pexpect
import pyte
from renderer import QUESTIONS

COLUMNS, LINES, PATIENCE = 80, 30, 60
CLEAR, DOWN, ENTER, END_OF_TEXT, TOGGLE_ALL = "\x15", "\x1b[B", "\r", "\x1b\r", "a"


class Terminal:
    """A terminal in which a command runs.

    Args:
        command: the program and its arguments.
    """

    def __init__(self, *command: object) -> None:
        self.screen = pyte.Screen(COLUMNS, LINES)
        self.stream = pyte.ByteStream(self.screen)
        name, *arguments = map(str, command)
        env = {**os.environ, "TERM": "linux", "LC_ALL": "C.UTF-8"}
        self.child = pexpect.spawn(
            name, arguments, env=env, dimensions=(LINES, COLUMNS), timeout=PATIENCE
        )
        # The program asks where the cursor is.
        self.screen.write_process_input = self.child.send  # type: ignore[method-assign]

    def type(self, *keys: str) -> None:
        """Press some keys."""
        self.child.send("".join(keys))

    def read(self) -> None:
        """Show what the command prints next."""
        self.stream.feed(self.child.read_nonblocking(4096, timeout=PATIENCE))

    def wait_for(self, text: str, end: str = "") -> None:
        """Wait until a text is on the screen, with another one later in its line."""
        pattern = f"{re.escape(text)}.*{re.escape(end)}"
        while not re.search(pattern, "\n".join(self.screen.display)):
            try:
                self.read()
            except (pexpect.EOF, pexpect.TIMEOUT) as error:
                raise AssertionError("\n".join([text + end, *self.screen.display])) from error

    def wait_for_message(self, name: str, end: str) -> None:
        """Wait until what a question's validator says is on the screen, with its end."""
        self.wait_for(f"Validation error for question '{name}': ", end)

    def wait_for_end(self) -> None:
        """Wait until the command has ended well."""
        said = self.child.read().decode()
        self.child.close()
        assert self.child.exitstatus == 0, said[-3000:]


def head(name: str) -> str:
    """Return the beginning of a question."""
    return QUESTIONS[name]["help"].partition(" {{")[0][:70]
