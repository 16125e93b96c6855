"""Which server runs where: a file for each job, in a folder that is the user's alone.

`monitor start` writes it when it has submitted the job, and the job writes it again once its server
answers. The job removes it at its end; one that is left by a job that is gone is stale.
"""

import dataclasses
import fcntl
import getpass
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from ...engine.errors import UsageError

Listen = Literal["socket", "loopback", "node"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """A server, or a job that is to become one.

    Args:
        server: such as `aim`.
        experiment: whose runs it shows; run: the only one, or empty.
        job, job_name: Slurm's id and name of the job; log: its log file.
        listen: what the server is bound to; certificate, key: files for TLS, or empty.
        node: where it answers, empty until it does.
        port: there, or at the user's end of a tunnel to the Unix socket at `socket`.
        exports: the file of variables that a job needs to log to it, if it takes runs.
    """

    server: str
    experiment: str
    run: str
    job: str
    job_name: str
    log: str
    listen: Listen
    certificate: str = ""
    key: str = ""
    node: str = ""
    port: int = 0
    socket: str = ""
    exports: str = ""

    @property
    def shows(self) -> str:
        """Its experiment, or experiment and run."""
        return f"{self.experiment}/{self.run}" if self.run else self.experiment

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"{self.server} of {self.shows}"

    @property
    def url(self) -> str:
        """The address at the user's end of a tunnel."""
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    def directions(self, login: str) -> str:
        """Return how to reach the server, from a machine that reaches the login node."""
        user = getpass.getuser()
        if self.listen == "node":
            way = f"{self.node}:{self.port} {user}@{login}"
        else:
            way = f"{self.socket or f'127.0.0.1:{self.port}'} -J {user}@{login} {user}@{self.node}"
        lines = [f"{self.title} answers on {self.node}, job {self.job}"]
        if self.server != "aim-server":
            lines += [
                "on your own machine, run",
                f"    ssh -N -L {self.port}:{way}",
                f"and open {self.url}",
            ]
        if self.exports:
            lines += [
                "to log to it, load these variables before you submit a job:",
                f"    set -a; . {self.exports}; set +a",
            ]
        if self.exports and self.server != "aim-server":
            lines.append("the same file has the user and the password that the pages ask for")
        elif self.listen != "socket":
            lines.append(f"there is no login: all who reach {self.node}'s ports can use it")
        return "\n".join(lines)


class Records:
    """The records of one user below a run root.

    Args:
        run_root: the folder of all experiments.

    Raises:
        UsageError: the folder of the records can't be made, or others may enter it.
    """

    def __init__(self, run_root: Path) -> None:
        # Users may share a run root, but not their servers.
        self.folder = run_root / f".servers-{getpass.getuser()}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            facts = self.folder.stat()
        except OSError as error:
            raise UsageError(
                f"can't make {self.folder}: {error.strerror}; choose another place by --run-root"
            ) from None
        if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise UsageError(f"others may enter {self.folder}: it must be yours, with mode 0700")

    def all(self) -> list[Record]:
        """Return all records, by server, experiment and run."""
        found = [self.read(path.stem) for path in self.folder.glob("*.json")]
        return sorted(filter(None, found), key=lambda each: (each.title, each.job))

    def read(self, job: str) -> Record | None:
        """Return the record of a job, None if there is none."""
        try:
            return Record(**json.loads((self.folder / f"{job}.json").read_text("utf-8")))
        except FileNotFoundError:
            return None

    def write(self, record: Record, create: bool = True) -> None:
        """Write a record, so that readers see all of it; without `create`, only if there is one."""
        path = self.folder / f"{record.job}.json"
        text = json.dumps(dataclasses.asdict(record), indent=2)
        fresh = self.write_secret(f"{record.job}.{os.getpid()}.tmp", text + "\n")
        if create:
            fresh.replace(path)
        else:
            with suppress(FileExistsError):
                os.link(fresh, path)
            fresh.unlink()

    def write_secret(self, name: str, text: str) -> Path:
        """Write a file that nobody else may read; return its path."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(text)
        return path

    def remove(self, job: str) -> None:
        """Forget a job."""
        for suffix in ("json", "env"):
            (self.folder / f"{job}.{suffix}").unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make others wait who are about to look for a server, and to start it."""
        with (self.folder / "lock").open("w") as file:
            with suppress(OSError):  # a file system without locks: then two may start at once
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
