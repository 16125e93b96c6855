"""trackio's pages. They can't delete or rename runs: this needs a token that nobody gets."""

import json
import sys

from . import guard
from .endpoint import Endpoint, Launch

LISTEN = ("socket", "loopback")
PAGE = "/version"


def launch(endpoint: Endpoint) -> Launch:
    """Return the command line of the server; it also moves what runs wrote into SQLite."""
    from ...trackers.trackio import storage

    login = guard.login(endpoint)
    env = {
        "TRACKIO_DIR": str(storage(endpoint.folder)),
        # The default, WAL, needs shared memory, which does not work between machines.
        "TRACKIO_SQLITE_JOURNAL_MODE": "delete",
        "TRACKIO_WRITE_TOKEN": "",  # empty: trackio makes a new token
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    command = [sys.executable, "-m", __name__, json.dumps(guard.options(endpoint))]
    return Launch(command, env | login, {} if endpoint.record.socket else login)


def page(run_id: str) -> str:
    """Return the path of a run's page."""
    return f"/run?selected_run_id={run_id}"


def main() -> None:
    """Run the server."""
    from trackio.server import build_starlette_app_only

    application, _ = build_starlette_app_only()
    guard.serve(application, json.loads(sys.argv[1]))


if __name__ == "__main__":
    main()
