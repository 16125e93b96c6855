"""Aim's pages. A query may run code as you (CVE-2025-51464), so nobody else may send one."""

import json
import sys
from typing import Any

from . import guard
from .endpoint import Endpoint, Launch

LISTEN = ("socket", "loopback")
PAGE = "/"


def command(endpoint: Endpoint, *words: str) -> list[str]:
    """Return a command of Aim for the experiment's repository; create it if there is none."""
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
    """Return the command line that serves an application of Aim's behind the guard."""
    names = ("uds", "host", "port", "ssl_keyfile", "ssl_certfile")
    options = {name: given[name] for name in names if given.get(name)}
    return [sys.executable, "-m", guard.__name__, application, json.dumps(options)]


def main() -> None:
    """Run a command of Aim, whose server then runs behind the guard."""
    from aim.cli.cli import cli_entry_point
    from aim.cli.server import commands as server
    from aim.cli.up import commands as up

    # Names that Aim does not document; its version is pinned.
    up.build_uvicorn_command = server.build_uvicorn_command = guarded
    cli_entry_point()


if __name__ == "__main__":
    main()
