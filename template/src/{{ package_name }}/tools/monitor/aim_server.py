"""Aim's tracking server, for runs on other nodes. Anyone with its password can run code as you."""

from urllib.parse import quote

from . import aim, guard
from .endpoint import Endpoint, Launch

LISTEN = ("node", "loopback")
PAGE = "/status/"


def launch(endpoint: Endpoint) -> Launch:
    """Return the command line of the server, with TLS if there is a certificate."""
    record = endpoint.record
    command = aim.command(endpoint, "server", f"--host={endpoint.address}", f"--port={record.port}")
    if record.certificate:
        command += [f"--ssl-certfile={record.certificate}", f"--ssl-keyfile={record.key}"]
    login = guard.login(endpoint)
    address = f"aim://{quote(login[guard.USER])}:{login[guard.PASSWORD]}@{endpoint.host}"
    return Launch(command, login, exports={"AIM_REPO": address})
