"""Protects a web application that has no login of its own.

On a port, it asks for a password. On ports and Unix sockets, it refuses requests that pages of
other sites make in the user's browser: the browser can reach the user's end of a tunnel, and it
knows the password.
"""

import getpass
import json
import os
import re
import secrets
import sys
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .endpoint import Endpoint

USER, PASSWORD = "MONITOR_USER", "MONITOR_PASSWORD"
Application = Callable[[Any, Any, Any], Awaitable[None]]


def login(endpoint: Endpoint) -> dict[str, str]:
    """Return environment variables with a new password; they are empty for a Unix socket."""
    if endpoint.record.socket:
        return {USER: "", PASSWORD: ""}
    return {USER: getpass.getuser(), PASSWORD: secrets.token_urlsafe(24)}


def options(endpoint: Endpoint) -> dict[str, Any]:
    """Return the options of uvicorn that say where to listen."""
    record = endpoint.record
    if record.socket:
        return {"uds": record.socket}
    return {"host": endpoint.address, "port": record.port}


class Guard:
    """An ASGI application in front of another one.

    Args:
        application: the application to protect.
        user, password: for HTTP Basic authentication. Without a password, a request must name the
            address of the user's end of a tunnel: a page of another site could reach this address
            by another name (DNS rebinding).
    """

    def __init__(self, application: Application, user: str, password: str) -> None:
        self.application = application
        self.expected = b64encode(f"{user}:{password}".encode()) if password else b""

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Pass a request on, or refuse it."""
        status = 200 if scope["type"] == "lifespan" else self._judge(dict(scope["headers"]))
        if status == 200:
            await self.application(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain"), (b"www-authenticate", b"Basic")]
            head = {"type": "http.response.start", "status": status}
            await send({**head, "headers": headers[: 2 if status == 401 else 1]})
            body = b"this page needs its password, in a request that comes from no other site\n"
            await send({"type": "http.response.body", "body": body})

    def _judge(self, headers: Mapping[bytes, bytes]) -> int:
        """Return the HTTP status for a request with these headers."""
        host = headers.get(b"host", b"").lower()
        if self.expected:
            scheme, _, login = headers.get(b"authorization", b"").partition(b" ")
            known = secrets.compare_digest(login.strip(), self.expected)
            if scheme.lower() != b"basic" or not known:
                return 401
        elif re.sub(rb":\d*$", b"", host) not in (b"127.0.0.1", b"localhost", b"[::1]"):
            return 403
        # Old browsers, and some browsers for websockets, send only Origin.
        site, origin = headers.get(b"sec-fetch-site", b"none"), headers.get(b"origin")
        own = origin is None or origin.lower().partition(b"://")[2] == host
        return 200 if own and site in (b"none", b"same-origin") else 403


def serve(application: Application, options: Mapping[str, Any]) -> None:
    """Serve an application until SIGTERM, with the login from the environment."""
    import uvicorn

    guard = Guard(application, os.environ.pop(USER), os.environ.pop(PASSWORD))
    # Aim's client sends large messages.
    uvicorn.run(guard, log_level="error", ws_max_size=2**30, **options)


def main() -> None:
    """Serve an application. The arguments are MODULE:NAME and the options as JSON."""
    from uvicorn.importer import import_from_string

    serve(import_from_string(sys.argv[1]), json.loads(sys.argv[2]))


if __name__ == "__main__":
    main()
