"""Aim's pages. They have no login, and can delete runs: keep them on the Unix socket."""

import sys

from .endpoint import Endpoint, Launch

LISTEN = ("socket", "loopback")
PAGE = "/"


def command(place: Endpoint, *words: str) -> list[str]:
    """Return a command of Aim's over the experiment's repository, which is made if need be."""
    from ...tracking.aim import repository

    code = "import sys; from aim.cli.cli import cli_entry_point; sys.exit(cli_entry_point())"
    return [sys.executable, "-c", code, *words, f"--repo={repository(place.folder)}"]


def launch(place: Endpoint) -> Launch:
    """Return what starts Aim's pages."""
    listen = [f"--host={place.address}", f"--port={place.record.port}"]
    if place.record.socket:
        listen = [f"--uds={place.record.socket}"]
    return Launch(command(place, "up", "--workers=1", *listen))


def page(run_id: str) -> str:
    """Return the path of a run's page."""
    return f"/runs/{run_id}"
