"""The flags of `monitor`."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from .records import Listen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Start the trackers' servers as Slurm jobs, and print how to open their pages.

    start: submit jobs and wait until the servers answer. stop: cancel the jobs. restart: do both.
    status: list the servers. url: print how to open them. logs: print the end of their logs.
    view RUN_DIR [SERVER]: open one run, in a separate TensorBoard or on its page.
    Options after -- go to sbatch, such as: monitor start aim -- --time=8:00:00
    """

    action: tyro.conf.Positional[
        Literal["start", "stop", "restart", "status", "url", "logs", "view", "serve"]
    ]
    """what to do; serve is only for the servers' jobs"""
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """servers, with the names of the scripts in slurm/monitoring;
    default: all (with start: all that have pages)"""
    run_root: Path | None = None
    """folder of all experiments; default: that of configs/train.yaml"""
    experiment: str | None = None
    """experiment of the servers; default: all (with start: that of configs/train.yaml)"""
    run: str = ""
    """with start and serve: show only this run of the experiment"""
    listen: Listen | None = None
    """socket: a Unix socket that only you can open; loopback: a port for all users of the node;
    node: a port for jobs on other nodes that log to it;
    default: the first that the server supports"""
    certificate: Path | None = None
    """file with a certificate for the names of the nodes, for TLS on a port"""
    key: Path | None = None
    """file with the certificate's private key"""
    follow: bool = False
    """with logs: print new lines until the server ends"""
