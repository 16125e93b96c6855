"""MLflow. On a Unix socket, the mode of the socket's folder protects it; on a port, a login."""

import getpass
import secrets
import shlex
import sys
from importlib.util import find_spec

from ...engine.errors import UsageError
from .endpoint import Endpoint, Launch

LISTEN = ("socket", "loopback", "node")
PAGE = "/health"


def launch(endpoint: Endpoint) -> Launch:
    """Return the command line of the server; create the experiment's database if it is missing.

    Raises:
        UsageError: a package that MLflow's login needs is missing.
    """
    from ...trackers.mlflow import database

    record = endpoint.record
    command = [sys.executable, "-m", "mlflow", "server", f"--host={endpoint.address}"]
    command += [f"--port={record.port}", f"--backend-store-uri={database(endpoint.folder)}"]
    command += [f"--artifacts-destination={(endpoint.folder / 'mlartifacts').as_uri()}"]
    # With one worker and without its job runner, MLflow starts in seconds and uses 0.5 GB.
    command += ["--workers=1"]
    env = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    if record.socket:
        return Launch([*command, f"--uvicorn-opts=--uds {shlex.quote(record.socket)}"], env)

    if not find_spec("flask_wtf"):
        raise UsageError(
            "MLflow's login needs Flask-WTF: pip install 'mlflow[auth]', or use --listen socket"
        )
    # MLflow then accepts only requests to the host names of a tunnel and of the node.
    hosts = f"localhost:*,127.0.0.1:*,{endpoint.host}"
    command += ["--app-name=basic-auth", f"--allowed-hosts={hosts}"]
    user, password = getpass.getuser(), secrets.token_urlsafe(24)
    accounts = endpoint.private / "accounts.ini"
    accounts.write_text(
        "[mlflow]\n"
        "default_permission = NO_PERMISSIONS\n"
        f"database_uri = sqlite:///{endpoint.private}/accounts.db\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    env |= {
        "MLFLOW_AUTH_CONFIG_PATH": str(accounts),
        "MLFLOW_AUTH_ADMIN_USERNAME": user,
        "MLFLOW_AUTH_ADMIN_PASSWORD": password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": secrets.token_urlsafe(32),
    }
    exports = {
        "MLFLOW_TRACKING_URI": f"{'https' if record.certificate else 'http'}://{endpoint.host}",
        "MLFLOW_TRACKING_USERNAME": user,
        "MLFLOW_TRACKING_PASSWORD": password,
    }
    if record.certificate:
        files = ["--ssl-certfile", record.certificate, "--ssl-keyfile", record.key]
        command += [f"--uvicorn-opts={shlex.join(files)}"]
        exports["MLFLOW_TRACKING_SERVER_CERT_PATH"] = record.certificate
    return Launch(command, env, exports)


def page(run_id: str) -> str:
    """Return the path of a run's page."""
    # MLflow has two kinds of pages: for language models, and for training runs.
    return f"/#/runs/{run_id}?workflowType=machine_learning"
