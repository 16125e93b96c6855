"""The flags of `monitor`."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from .records import Listen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Start the trackers' servers as Slurm jobs, and print how to open their pages.

    start, stop, restart: submit jobs and wait until the servers answer; cancel jobs; do both.
    status, url, logs: list the servers; print how to open them; print the end of their logs.
    view RUN_DIR [SERVER]: open one run, in a separate TensorBoard or on its page.
    Options after -- go to sbatch: monitor start aim -- --time=8:00:00
    """

    action: tyro.conf.Positional[
        Literal["start", "stop", "restart", "status", "url", "logs", "view", "serve"]
    ]
    """what to do; only the servers' jobs use serve"""
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """servers, with the names of the scripts in slurm/monitoring; else all (with start: all that
    have pages)"""
    run_root: Path | None = None
    """folder of all experiments; else that of configs/train.yaml"""
    experiment: str | None = None
    """experiment of the servers; else all (with start: that of configs/train.yaml)"""
    run: str = ""
    """with start and serve: show only this run of the experiment"""
    listen: Listen | None = None
    """socket: a Unix socket that only you can open; loopback: a port for all users of the node;
    node: a port for other nodes, whose jobs log to it; else the first that the server supports"""
    certificate: Path | None = None
    """file of a certificate for the names of the nodes, for TLS on a port"""
    key: Path | None = None
    """file of the certificate's key"""
    follow: bool = False
    """with logs: print new lines until the server ends"""
