"""The test cluster leaves the machine unchanged, however it ends."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from . import accounts
from .cluster import missing, wait_for

HOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
from slurm.cluster import Cluster
with Cluster(nodes=2, accounts=sys.argv[2] == "accounts") as cluster:
    cluster.run("sbatch", "--nodes=2", "--output=/dev/null", "--wrap", "srun sleep 1000")
    print(cluster.folder, flush=True)
    sys.stdin.readline()
"""


def machine() -> list[str]:
    """What the cluster must not touch."""
    commands = (["ip", "-brief", "link"], ["hostname"], ["cat", "/proc/mounts", "/etc/hosts"])
    return [subprocess.run(each, capture_output=True, text=True).stdout for each in commands]


def members(folder: str) -> list[psutil.Process]:
    """The processes of a cluster."""
    found = []
    for process in psutil.process_iter(["name"]):
        try:
            if process.environ().get("SLURM_CONF") == f"{folder}/slurm.conf":
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(("killed", "kept"), [(False, "nothing"), (True, "accounts")])
def test_nothing_is_left(killed: bool, kept: str) -> None:
    if reason := missing() or (accounts.missing() if kept == "accounts" else None):
        pytest.skip(reason)
    before = machine()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(Path(__file__).parents[1]), kept],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder = holder.stdout.readline().strip()
    names = {"slurmctld", "slurmd", "munged", "srun", "sleep"}
    names |= {"slurmdbd", "mariadbd"} if kept == "accounts" else set()
    wait_for(
        lambda: names <= {process.info["name"] for process in members(folder)},
        lambda: f"{members(folder)}",
    )
    assert machine() == before
    if killed:
        holder.send_signal(signal.SIGKILL)
    holder.communicate("end\n" if not killed else None)
    assert holder.returncode == (-signal.SIGKILL if killed else 0)
    wait_for(lambda: not members(folder), lambda: f"{members(folder)}")
    assert machine() == before
    # Who is killed can't tidy up its temporary folder.
    assert Path(folder).exists() == killed
    shutil.rmtree(folder, ignore_errors=True)
