"""The address of a server, what it serves, and its command line."""

import dataclasses
from pathlib import Path

from .records import Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of a server, and what it serves.

    Args:
        record: with the node and the port.
        folder: the folder of the experiment, absolute.
        address: the address to bind to, unless the record names a Unix socket.
        private: a folder of this job on its node, which only the user may enter.
    """

    record: Record
    folder: Path
    address: str
    private: Path

    @property
    def host(self) -> str:
        """HOST:PORT of the server, for jobs that log to it."""
        name = self.record.node if self.record.listen == "node" else self.address
        return f"{name}:{self.record.port}"


@dataclasses.dataclass(frozen=True)
class Launch:
    """A server's command line.

    Args:
        command: the words of the command.
        env: environment variables for the server.
        exports: environment variables for jobs that log to the server.
    """

    command: list[str]
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    exports: dict[str, str] = dataclasses.field(default_factory=dict)
