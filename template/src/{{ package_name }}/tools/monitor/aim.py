"""Aim's pages. A query can run code as you (CVE-2025-51464), so nobody else may send a query."""

import json
import sys
from typing import Any

from . import guard
from .endpoint import Endpoint, Launch

LISTEN = ("socket", "loopback")
PAGE = "/"


def command(endpoint: Endpoint, *words: str) -> list[str]:
    """Return a command of Aim for the experiment's repository; create a missing repository."""
    from ...trackers.aim import repository

    return [sys.executable, "-m", __name__, *words, f"--repo={repository(endpoint.folder)}"]


def launch(endpoint: Endpoint) -> Launch:
    """Return the command line of Aim's pages."""
    login = guard.login(endpoint)
    listen = [f"--{name}={value}" for name, value in guard.options(endpoint).items()]
    words = command(endpoint, "up", "--workers=1", *listen)
    return Launch(words, login, {} if endpoint.record.socket else login)


def page(run_id: str) -> str:
    """Return the path of a run's page."""
    return f"/runs/{run_id}"


def guarded(application: str, **given: Any) -> list[str]:  # noqa: ANN401 - what uvicorn takes
    """Return the command line that serves an application of Aim with the guard in front of it."""
    names = ("uds", "host", "port", "ssl_keyfile", "ssl_certfile")
    options = {name: given[name] for name in names if given.get(name)}
    return [sys.executable, "-m", guard.__name__, application, json.dumps(options)]


def main() -> None:
    """Run a command of Aim so that its server has the guard in front of it."""
    from aim.cli.cli import cli_entry_point
    from aim.cli.server import commands as server
    from aim.cli.up import commands as up

    # Aim does not document these names, so its version is pinned.
    up.build_uvicorn_command = server.build_uvicorn_command = guarded
    cli_entry_point()


if __name__ == "__main__":
    main()
