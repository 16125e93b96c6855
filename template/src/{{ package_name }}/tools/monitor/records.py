"""The records of servers: a file for each job, in a folder that only the user may enter.

`monitor start` writes the file after it has submitted the job. The job writes it again when its
server answers, and removes it when it ends. If the job was killed, the file is stale.
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
    """A server, or a job that has not started it yet.

    Args:
        server: its name, such as `aim`.
        experiment: the experiment that it shows.
        run: the only run that it shows; empty for all runs of the experiment.
        job, job_name: Slurm's id and name of the job.
        log: the log file of the job.
        listen: where the server listens: socket, loopback or node.
        certificate, key: files for TLS, or empty.
        node: the node of the server; empty until the server answers.
        port: the port on the node, or at the user's end of a tunnel to the Unix socket.
        socket: the path of the Unix socket, or empty.
        exports: the file of variables with the login, and the address for jobs that log to it, or
            empty.
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
        """What the server shows: an experiment, or an experiment and a run."""
        return f"{self.experiment}/{self.run}" if self.run else self.experiment

    @property
    def title(self) -> str:
        """The server's name in messages."""
        return f"{self.server} of {self.shows}"

    @property
    def url(self) -> str:
        """The URL at the user's end of a tunnel."""
        return f"{'https' if self.certificate else 'http'}://127.0.0.1:{self.port}"

    def directions(self, login: str) -> str:
        """Return how to open the server's pages from a machine that can reach the login node."""
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
        if self.exports and self.server in ("aim-server", "mlflow"):
            lines += [
                "to log to it, load these variables before you submit a job:",
                f"    set -a; . {self.exports}; set +a",
            ]
        if self.exports and self.server != "aim-server":
            lines.append(f"the user and the password for the pages are in {self.exports}")
        elif not self.exports and self.listen != "socket":
            lines.append(f"there is no login: all who can connect to {self.node} can use it")
        return "\n".join(lines)


class Records:
    """The records of one user in a run root.

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
                f"can't create {self.folder}: {error.strerror}; change --run-root"
            ) from None
        if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
            raise UsageError(f"others can enter {self.folder}: make it yours, with mode 0700")

    def all(self) -> list[Record]:
        """Return all records, by server, experiment and run."""
        found = [self.read(path.stem) for path in self.folder.glob("*.json")]
        return sorted(filter(None, found), key=lambda each: (each.title, each.job))

    def read(self, job: str) -> Record | None:
        """Return the record of a job, or None if there is none."""
        try:
            return Record(**json.loads((self.folder / f"{job}.json").read_text("utf-8")))
        except FileNotFoundError:
            return None

    def write(self, record: Record, create: bool = True) -> None:
        """Write a record atomically.

        Args:
            record: of a job.
            create: if False, keep a record that the job has written in the meantime.
        """
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
        """Write a file that only the user can read; return its path."""
        path = self.folder / name
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(text)
        return path

    def remove(self, job: str) -> None:
        """Remove the files of a job."""
        for suffix in ("json", "env"):
            (self.folder / f"{job}.{suffix}").unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock, so that two commands do not start the same server at once."""
        with (self.folder / "lock").open("w") as file:
            with suppress(OSError):  # without locks on the file system, both may start it
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
