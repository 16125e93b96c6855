"""The servers of this project, and where each can listen."""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from ...engine.errors import UsageError
from .flags import Flags

SCRIPTS = Path("slurm/monitoring")


def script(name: str) -> str:
    """Return the batch script of a server."""
    return str(SCRIPTS / f"{name.replace('-', '_')}.sbatch")


def available() -> list[str]:
    """Return the names of the servers for which this project has a script.

    Raises:
        UsageError: the current folder is not the project's root.
    """
    if not SCRIPTS.is_dir():
        raise UsageError(f"there is no {SCRIPTS} here: run this from the project's root")
    return sorted(path.stem.replace("_", "-") for path in SCRIPTS.glob("*.sbatch"))


def server(name: str) -> ModuleType:
    """Return the module of a server.

    Raises:
        UsageError: the project has no server with this name.
    """
    if name not in available():
        raise UsageError(f"there is no server '{name}': this project has {', '.join(available())}")
    return import_module(f".{name.replace('-', '_')}", __package__)


def binding(name: str, flags: Flags) -> dict[str, Any]:
    """Return the values of `Record.listen`, `certificate` and `key` for the flags.

    Raises:
        UsageError: the server can't listen there, or a file for TLS is missing.
    """
    can = server(name).LISTEN
    listen = flags.listen or can[0]
    if listen not in can:
        raise UsageError(f"{name} does not support --listen {listen}: choose {' or '.join(can)}")
    if not flags.certificate and not flags.key:
        return {"listen": listen}
    if listen == "socket" or "node" not in can:
        raise UsageError(
            "--certificate and --key are for aim-server and mlflow on a port: leave them out"
        )
    for file in (flags.certificate, flags.key):
        if not file or not file.is_file():
            raise UsageError(
                f"TLS needs --certificate and --key: {file or 'one of them'} is missing"
            )
    certificate, key = (str(Path(str(file)).absolute()) for file in (flags.certificate, flags.key))
    return {"listen": listen, "certificate": certificate, "key": key}
