"""Accounting for a test cluster: slurmdbd, its database, and nodes that count their energy.

The database listens on a socket in the cluster's folder, and on no port. The nodes have the files
in which Cray's nodes count joules. A process writes these files, and Slurm reads them as real ones.
"""

import os
import shutil
import subprocess
from pathlib import Path

WATTS = 1000  # power of each node, whether it works or not


def missing() -> str | None:
    """Return why this machine's Slurm can't keep accounts, or None if it can."""
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    found = {name: shutil.which(name, path=path) for name in ("slurmctld", "slurmdbd", "mariadbd")}
    if absent := [name for name, command in found.items() if not command]:
        return f"accounts need {', '.join(absent)}: run scripts/install-slurm.sh"
    version = subprocess.check_output([str(found["slurmctld"]), "-V"], text=True).split()[-1]
    if version.startswith("26.05"):
        # True in November 2026. Try again when Debian has newer packages.
        return f"slurmdbd {version} can't read what its database answers (error 5027)"
    return None


def settings(folder: Path) -> str:
    """Return lines of slurm.conf. Jobs get the step `extern`, as at many sites."""
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=login
# Where munge is: the clients of slurmdbd do not read AuthInfo.
AccountingStoragePass={folder}/munge/socket
AccountingStorageTRES=gres/gpu
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1,energy=1
AcctGatherEnergyType=acct_gather_energy/pm_counters
PrologFlags=Contain
"""


def configure(folder: Path) -> None:
    """Write the configuration of slurmdbd, readable only for its user, and make its folders."""
    path = folder / "slurmdbd.conf"
    path.touch(mode=0o600)
    path.write_text(f"""\
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost=login
SlurmUser=root
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageUser=root
""")
    (folder / "database").mkdir()
    (folder / "joules").mkdir()


def database(folder: Path) -> tuple[str, ...]:
    """Return the command that starts the database, which has no users."""
    return (
        *("mariadbd", "--no-defaults", "--user=root", "--skip-grant-tables", "--skip-networking"),
        *(f"--datadir={folder}/database", f"--socket={folder}/database.socket"),
        *(f"--pid-file={folder}/database.pid", "--innodb-buffer-pool-size=32M"),
        "--innodb-flush-log-at-trx-commit=0",
    )


def meter(folder: Path) -> tuple[str, ...]:
    """Return the command that writes the joules of a node."""
    loop = f"""
    cd {folder}/joules
    echo {WATTS} W >power
    while true; do
        echo $((${{EPOCHREALTIME/./}} * {WATTS} / 1000000)) J >new
        mv new energy
        sleep 0.2
    done
    """
    return "bash", "-euc", loop


def show_meter(folder: Path, node: str) -> str:
    """Return the shell commands that mount the meter in the namespace of a node.

    No folder can be made in /sys, so the node gets another /sys, which contains this machine's
    folders.
    """
    return f"""
    new={folder}/sys-{node}
    mkdir $new
    mount -t tmpfs tmpfs $new
    for each in /sys/*; do
        mkdir $new/${{each##*/}}
        mount --rbind $each $new/${{each##*/}}
    done
    mkdir -p $new/cray/pm_counters
    mount --bind {folder}/joules $new/cray/pm_counters
    mount --rbind $new /sys
    """
