"""The flags of `monitor`."""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from .records import Listen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Start the trackers' servers as Slurm jobs, and say how to open their pages.

    start, stop, restart: submit jobs, end them; wait until the servers answer, until they are gone.
    status, url, logs: list the servers; say how to open them; show the end of what they said.
    view RUN_DIR [SERVER]: open one run, with TensorBoard over it alone, or on its page.
    What follows -- is for sbatch: monitor start aim -- --time=8:00:00
    """

    action: tyro.conf.Positional[
        Literal["start", "stop", "restart", "status", "url", "logs", "view", "serve"]
    ]
    """what to do; serve is what the jobs themselves run"""
    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """servers, as the scripts in slurm/monitoring are called; else all, and to start, all that
    have pages"""
    run_root: Path | None = None
    """folder of all experiments; else the one that configs/train.yaml names"""
    experiment: str | None = None
    """whose servers; else all, and to start, those of the one that configs/train.yaml names"""
    run: str = ""
    """with start and serve: show this run of the experiment alone"""
    listen: Listen | None = None
    """socket: a Unix socket that only you may open; loopback: a port that all users of the node
    reach; node: a port that other nodes reach, to log to. Else the first that the server can"""
    certificate: Path | None = None
    """for TLS on a port: a certificate for the names of the nodes"""
    key: Path | None = None
    """the certificate's key"""
    follow: bool = False
    """with logs: go on until the server ends"""
