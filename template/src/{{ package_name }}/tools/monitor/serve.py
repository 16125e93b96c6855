"""Runs in the job of a server: starts the server, waits until it answers, and records it."""

import dataclasses
import http.client
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, ModuleType

from ...engine.errors import UsageError, say
from ...engine.ranks.environment import PORTS
from .endpoint import Endpoint
from .records import Record, Records

TIMEOUT = 300  # seconds until a server answers; imports from a shared folder can take minutes
KILL_AFTER = 10  # seconds from SIGTERM to SIGKILL


def serve(server: ModuleType, record: Record, run_root: Path) -> int:
    """Run a server until it ends or the job is cancelled; return its exit code.

    Args:
        server: the module that has the server's command.
        record: of the server; node and port are added when it answers.
        run_root: the folder of all experiments.

    Raises:
        UsageError: the server does not answer in time.
    """
    records = Records(run_root)
    signal.signal(signal.SIGTERM, _leave)
    # The path of a Unix socket may have at most 107 characters.
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) < 80 else "/tmp"
    with tempfile.TemporaryDirectory(prefix="monitor-", dir=parent) as private:
        endpoint = _endpoint(record, run_root, Path(private))
        launch = server.launch(endpoint)
        # In a new session, so that all of its processes can be ended at once.
        process = subprocess.Popen(
            launch.command, env={**os.environ, **launch.env}, start_new_session=True
        )
        try:
            _wait_for(process, endpoint, server.PAGE)
            answering = endpoint.record
            if launch.exports:
                lines = [f"{name}={shlex.quote(text)}\n" for name, text in launch.exports.items()]
                file = records.write_secret(f"{record.job}.env", "".join(lines))
                answering = dataclasses.replace(answering, exports=str(file))
            records.write(answering)
            login = os.environ.get("SLURM_SUBMIT_HOST", "LOGIN_NODE")
            say(answering.directions(login))
            return process.wait()
        finally:
            records.remove(record.job)
            _end(process)


def _endpoint(record: Record, run_root: Path, private: Path) -> Endpoint:
    """Return the endpoint for a server on this node: a socket, or a port that is free."""
    address, unix = "127.0.0.1", ""
    if record.listen == "node":
        address = _address()
    if record.listen == "socket":
        # The port is for the user's end of the tunnel; it differs between jobs.
        port, unix = PORTS[int(record.job) % len(PORTS)], str(private / "socket")
    else:
        with socket.socket() as probe:
            probe.bind((address, 0))
            port = probe.getsockname()[1]
    listening = dataclasses.replace(record, node=socket.gethostname(), port=port, socket=unix)
    return Endpoint(
        record=listening, folder=run_root / record.experiment, address=address, private=private
    )


def _wait_for(process: subprocess.Popen, endpoint: Endpoint, page: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not _answers(endpoint, page):
        if process.poll() is not None:
            raise UsageError(
                f"the server ended with exit code {process.returncode}: see its output above"
            )
        if time.monotonic() > deadline:
            raise UsageError(f"the server did not answer within {TIMEOUT} s: see its output above")
        time.sleep(0.2)


def _answers(endpoint: Endpoint, page: str) -> bool:
    """Return whether the server answers a request without a server error (HTTP 5xx)."""
    record = endpoint.record
    connection = http.client.HTTPConnection(endpoint.host, timeout=10)
    try:
        if record.socket:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(record.socket)
        else:
            connection.sock = socket.create_connection((endpoint.address, record.port))
        connection.sock.settimeout(10)
        if record.certificate:
            # This job started the server, so it need not check the certificate.
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection.sock = context.wrap_socket(connection.sock)
        connection.request("GET", page)
        return connection.getresponse().status < 500
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _end(process: subprocess.Popen) -> None:
    """End all processes of a server. Some processes of MLflow ignore SIGTERM for a while."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + KILL_AFTER
        try:
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        except ProcessLookupError:
            return


def _leave(_signal: int, _frame: FrameType | None) -> None:
    # A second signal would interrupt the cleanup.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _address() -> str:
    """Return the address that this node uses to reach the login node.

    The node's own name may resolve to several addresses, or only to 127.0.1.1.
    """
    for name in (os.environ.get("SLURM_SUBMIT_HOST"), socket.gethostname()):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((name, 9))  # nothing is sent
            address = probe.getsockname()[0]
            if not address.startswith("127."):
                return address
    raise UsageError("other nodes can't reach this node: leave out --listen node")
