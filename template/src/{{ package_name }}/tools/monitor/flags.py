"""The flags of `monitor`."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from .records import Listen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Start the trackers' servers as Slurm jobs, and print how to open their pages.

    start, stop, restart: submit jobs and wait until the servers answer; cancel jobs; both.
    status, url, logs: list the servers; print how to open them; print the end of their logs.
    view RUN_DIR [SERVER]: open one run, in a TensorBoard of its own or on its page.
    Options after -- go to sbatch: monitor start aim -- --time=8:00:00
    """

    action: tyro.conf.Positional[
        Literal["start", "stop", "restart", "status", "url", "logs", "view", "serve"]
    ]
    """what to do; only the jobs themselves use serve"""
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """servers, named as the scripts in slurm/monitoring; else all (with start: all that have
    pages)"""
    run_root: Path | None = None
    """folder of all experiments; else that of configs/train.yaml"""
    experiment: str | None = None
    """experiment of the servers; else all (with start: that of configs/train.yaml)"""
    run: str = ""
    """with start and serve: show only this run of the experiment"""
    listen: Listen | None = None
    """socket: a Unix socket that only you may open; loopback: a port that all users of the node
    reach; node: a port that other nodes reach, to log to. Else the first that the server can"""
    certificate: Path | None = None
    """file of a certificate for the names of the nodes, for TLS on a port"""
    key: Path | None = None
    """file of the certificate's key"""
    follow: bool = False
    """with logs: print new lines until the server ends"""
