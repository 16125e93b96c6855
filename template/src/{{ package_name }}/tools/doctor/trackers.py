"""The trackers that the settings name: installed, and within reach."""

import os
import socket
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ... import tracking
from .findings import Finding, attempt
from .locks import lock

if TYPE_CHECKING:
    from ...settings import Settings

DOTENV = Path(".env")
TIMEOUT = 10  # seconds for a server's answer
# Trackers with a database in files, unless a variable names a server: its URL begins like this.
DATABASES = {
    "mlflow": ("MLFLOW_TRACKING_URI", ("http://", "https://")),
    "aim": ("AIM_REPO", ("aim://",)),
}


def check(settings: "Settings") -> Iterator[Finding]:
    """Import each tracker as a run would, and see that its server answers."""
    root = Path(settings.run_root).absolute()
    folder = next(each for each in (root, *root.parents) if each.is_dir())
    for name in tracking.select(settings.trackers):
        yield from attempt(name, _one, name, folder)
    if DOTENV.exists() and DOTENV.stat().st_mode & 0o077:
        yield Finding("warning", ".env", "others can read the keys in .env: chmod 600 .env")


def databases(settings: "Settings") -> dict[str, str]:
    """Return which trackers have a database in files, each with the variable for a server."""
    return {
        name: DATABASES[name][0]
        for name in tracking.select(settings.trackers)
        if name in DATABASES and not _server_url(name)
    }


def _server_url(name: str) -> str:
    """Return the URL of the server that a tracker writes to; empty if it writes files."""
    variable, schemes = DATABASES[name]
    url = os.environ.get(variable, "")
    return url if url.startswith(schemes) else ""


def _one(name: str, folder: Path) -> Iterator[Finding]:
    tracking.load(name)
    found = f"version {version(name)}" if name in SERVERS else "can be imported"
    yield from SERVERS.get(name, _files)(name, found, folder)


def _files(name: str, found: str, _folder: Path) -> Iterator[Finding]:
    yield Finding("ok", name, f"{found}, writes files")


def _database(name: str, found: str, folder: Path, server: str) -> Finding:
    """Return whether files can be locked, as databases must: on some file systems they can't."""
    if sys.platform != "win32":
        with tempfile.TemporaryFile(dir=folder) as file:
            try:
                lock(file)
            except OSError as error:
                message = f"files in {folder} can't be locked ({error.strerror}), as its database "
                message += "must be: choose --run-root on another file system, or name a server in "
                return Finding("error", name, message + server)
    return Finding("ok", name, f"{found}, writes files")


def _wandb(name: str, found: str, _folder: Path) -> Iterator[Finding]:
    """W&B falls back to files, so nothing here is an error."""
    mode = os.environ.get("WANDB_MODE")
    if mode not in (None, "", "online"):
        yield Finding("ok", name, f"{found}, {mode} as WANDB_MODE says")
    elif not mode and not (os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_SWEEP_ID")):
        yield Finding(
            "warning",
            name,
            f"{found}, but WANDB_API_KEY is not set, so runs are offline: put it into .env, "
            "or set WANDB_MODE=offline there",
        )
    else:
        url = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
        where, trouble = _fetch(url, "")
        if trouble:
            message = f"{found}, but {where} can't be reached ({trouble}), so runs are offline"
            yield Finding("warning", name, f"{message}: 'sync' sends them later")
        else:
            yield Finding("ok", name, f"{found}, {where} answers")


def _mlflow(name: str, found: str, folder: Path) -> Iterator[Finding]:
    if url := _server_url(name):
        yield _server(name, found, *_fetch(url, "/health"), "MLFLOW_TRACKING_URI")
    else:
        yield _database(name, found, folder, "MLFLOW_TRACKING_URI")


def _aim(name: str, found: str, folder: Path) -> Iterator[Finding]:
    if not (url := _server_url(name)):
        yield _database(name, found, folder, "AIM_REPO")
        return
    parts = urlsplit(url)
    where = f"{parts.hostname}:{parts.port or 53800}"
    trouble = ""
    try:
        socket.create_connection((parts.hostname, parts.port or 53800), TIMEOUT).close()
    except OSError as error:
        trouble = str(error)
    yield _server(name, found, where, trouble, "AIM_REPO")


def _server(name: str, found: str, where: str, trouble: str, variable: str) -> Finding:
    """Return whether a server answers that a variable names; without it, no run is recorded."""
    if not trouble:
        return Finding("ok", name, f"{found}, {where} answers")
    message = f"{where}, which {variable} names, can't be reached ({trouble})"
    return Finding("error", name, f"{message}: start the server, or unset the variable")


def _fetch(url: str, path: str) -> tuple[str, str]:
    """Ask a server for a page; return its address and, if it does not answer, why.

    A user and a password in the URL are left out, of the request and of what is said.
    """
    parts = urlsplit(url)
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    try:
        with urllib.request.urlopen(address + parts.path.rstrip("/") + path, timeout=TIMEOUT):
            return address, ""
    except urllib.error.HTTPError as error:
        # Any server that refuses a page is there; a gateway says that there is none.
        return address, f"{error.code} {error.reason}" if error.code >= 500 else ""
    except (OSError, ValueError) as error:
        return address, str(getattr(error, "reason", error))


SERVERS: dict[str, Callable[[str, str, Path], Iterator[Finding]]] = {
    "tensorboard": _files,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "aim": _aim,
}
