"""Aim's pages. They have no login and can delete runs, so keep them on the Unix socket."""

import sys

from .endpoint import Endpoint, Launch

LISTEN = ("socket", "loopback")
PAGE = "/"


def command(endpoint: Endpoint, *words: str) -> list[str]:
    """Return a command of Aim for the experiment's repository; create it if there is none."""
    from ...trackers.aim import repository

    code = "import sys; from aim.cli.cli import cli_entry_point; sys.exit(cli_entry_point())"
    return [sys.executable, "-c", code, *words, f"--repo={repository(endpoint.folder)}"]


def launch(endpoint: Endpoint) -> Launch:
    """Return the command line of Aim's pages."""
    listen = [f"--host={endpoint.address}", f"--port={endpoint.record.port}"]
    if endpoint.record.socket:
        listen = [f"--uds={endpoint.record.socket}"]
    return Launch(command(endpoint, "up", "--workers=1", *listen))


def page(run_id: str) -> str:
    """Return the path of a run's page."""
    return f"/runs/{run_id}"
