"""A stand-in for W&B's server: the part of its GraphQL that `wandb sweep` and `wandb agent` use.

It was written from the requests of wandb 0.31 and from how wandb uses the answers. It hands out the
trials that a test names, one after another, and then says "exit". If an agent falls silent, its
trial is the first one for the next agent that registers, as W&B does with preempted runs. It does
not search, and it does not store the trials' runs.

    python wandb_server.py ADDRESS CONFIG TRIALS    # prints its port; ends when its input ends
"""

import json
import re
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

KEY = "0123456789" * 4


class Server(ThreadingHTTPServer):
    """The server of one sweep.

    Args:
        trials: settings of each trial.
        config: configuration of the sweep.
        address: address to listen on.

    Attributes:
        started: ids of the trials that were handed out, in order.
        stopping: ids of the trials that the agent must stop.
        created: the sweep that `wandb sweep` sent.
    """

    def __init__(
        self, trials: Sequence[dict[str, Any]], config: str = "", address: str = "127.0.0.1"
    ) -> None:
        super().__init__((address, 0), Handler)
        self.trials = {f"t{number}": trial for number, trial in enumerate(trials)}
        self.waiting = list(self.trials)
        self.running: set[str] = set()
        self.config = config
        self.started: list[str] = []
        self.stopping: set[str] = set()
        self.created: dict[str, Any] = {}

    def __enter__(self) -> "Server":
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables with which wandb uses this server."""
        host, port = self.server_address[:2]
        return {"WANDB_BASE_URL": f"http://{host}:{port}", "WANDB_API_KEY": KEY}

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a query, with only the fields that wandb needs."""
        (name,) = re.findall(r"(?:query|mutation)\s+(\w+)", query)[:1]
        if name == "Viewer":
            user = {"id": "VXNlcjox", "entity": "ada", "username": "ada", "email": "ada@localhost"}
            return {"viewer": {**user, "flags": "{}", "teams": {"edges": []}}}
        if name == "SweepWithRuns":
            sweep = {"id": "U3dlZXA6MQ==", "name": "x1", "state": "RUNNING", "config": self.config}
            return {"project": {"sweep": {**sweep, "runs": {"edges": []}}}}
        if name == "CreateAgent":
            self.waiting = [*self.running, *self.waiting]
            return {"createAgent": {"agent": {"id": "QWdlbnQ6MQ=="}}}
        if name == "Heartbeat":
            commands = self.commands(json.loads(variables["runState"]))
            return {"agentHeartbeat": {"agent": {"id": "1"}, "commands": json.dumps(commands)}}
        if name == "UpsertSweep":
            self.created = yaml.safe_load(variables["config"])
            project = {"id": "1", "name": "net", "entity": {"id": "1", "name": "ada"}}
            return {"upsertSweep": {"sweep": {"name": "x1", "project": project}}}
        return {}

    def commands(self, running: dict[str, bool]) -> list[dict[str, Any]]:
        """Return the commands for an agent that runs these trials."""
        self.running = set(running)
        if stop := self.stopping & self.running:
            return [{"type": "stop", "run_id": run} for run in stop]
        if running:
            return []
        if not self.waiting:
            return [{"type": "exit"}]
        run = self.waiting.pop(0)
        kind = "resume" if run in self.started else "run"
        self.started.append(run)
        self.running = {run}
        args = {name: {"value": value} for name, value in self.trials[run].items()}
        return [{"type": kind, "run_id": run, "args": args, "program": "-"}]


class Handler(BaseHTTPRequestHandler):
    """A request to the server."""

    server: Server

    def do_POST(self) -> None:
        """Answer a GraphQL query. Any other request, such as telemetry, gets an empty answer."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data: dict[str, Any] = {}
        if self.path == "/graphql":
            asked = json.loads(body)
            data = self.server.answer(asked["query"], asked.get("variables") or {})
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def config(project: Path) -> str:
    """Return a project's sweep configuration as `wandb sweep` reads it."""
    return (project / "configs/sweep.yaml").read_text()


if __name__ == "__main__":
    host, path, given = sys.argv[1:]
    with Server(json.loads(given), Path(path).read_text(), host) as server:
        print(server.server_port, flush=True)
        sys.stdin.read()
