"""Aim's tracking server, for runs on other nodes. It has no login: all who reach it can write."""

from . import aim
from .endpoint import Endpoint, Launch

LISTEN = ("node", "loopback")
PAGE = "/status/"


def launch(endpoint: Endpoint) -> Launch:
    """Return the command line of the server, with TLS if there is a certificate."""
    record = endpoint.record
    command = aim.command(endpoint, "server", f"--host={endpoint.address}", f"--port={record.port}")
    if record.certificate:
        command += [f"--ssl-certfile={record.certificate}", f"--ssl-keyfile={record.key}"]
    return Launch(command, exports={"AIM_REPO": f"aim://{endpoint.host}"})
