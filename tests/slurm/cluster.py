"""A real Slurm cluster on this machine: slurmctld, munge and a slurmd for each node.

The cluster has its own namespaces for processes, network, mounts and hostnames. Its first process
reads from a pipe that the test keeps open. When the pipe closes for any reason, the kernel ends all
processes of the cluster, and its networks and mounts disappear. The machine's own Slurm, munge,
network and /etc do not change.

    test ──pipe── init                      "login": bridge, munged, slurmctld, sbatch
                   ├── slurmd n1, its jobs  n1: an address, a hostname
                   └── slurmd n2, its jobs  n2
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import psutil

from . import accounts, pyxis

PATIENCE = 300  # seconds; if something takes longer, it hangs
COMMANDS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "nsenter", "unshare")
COVERAGE = ("BASH_ENV", "COVERAGE_FOLDER", "COVERAGE_PROCESS_START")
SUBNET = "10.77.0"  # any subnet works, because the cluster's network is isolated
CORES, MEMORY, GPUS = 16, 32000, 4  # of a node, as configured in Slurm; MEMORY in MB


def missing() -> str | None:
    """Return why this machine can't run a cluster, or None if it can."""
    if not sys.platform.startswith("linux"):
        return "a Slurm cluster needs Linux"
    if os.geteuid() != 0:
        return "a Slurm cluster needs root, for its namespaces: run the tests with sudo"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [name for name in COMMANDS if not shutil.which(name, path=path)]
    if absent:
        return f"a Slurm cluster needs {', '.join(absent)}: run scripts/install-slurm.sh"
    return None


class Cluster:
    """A cluster that runs during the `with` block.

    Args:
        nodes: number of nodes, which are called n1, n2, ...
        settings: lines to add to slurm.conf.
        gpus: GPUs of each node.
        memory: memory of each node, in MB.
        cores: CPU cores of each node.
        job_submit: Lua code with which slurmctld checks each job before it accepts the job.
        cli_filter: Lua code with which sbatch and srun check their options.
        hasty: whether a requeued job starts at once, and Slurm soon gives up a node that does not
            answer. If this machine then pauses for some seconds, Slurm loses jobs.
        accounts: whether Slurm keeps accounts of jobs for sacct, with the energy of the nodes.

    Attributes:
        folder: folder of configuration, logs and state; removed at the end.
        small: a folder on each node that can hold 8 MiB, for tests of a full disk.
    """

    def __init__(
        self,
        nodes: int = 3,
        settings: str = "",
        gpus: int = GPUS,
        memory: int = MEMORY,
        cores: int = CORES,
        job_submit: str = "",
        cli_filter: str = "",
        hasty: bool = False,
        accounts: bool = False,
    ) -> None:
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self.settings = settings
        self.gpus = gpus
        self.memory, self.cores, self.hasty = memory, cores, hasty
        self.job_submit, self.cli_filter = job_submit, cli_filter
        self.accounts = accounts
        # munge refuses folders inside a folder that only its owner can open, such as pytest's.
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-cluster-"))
        self.small = self.folder / "small"
        self.daemons: list[subprocess.Popen] = []
        self.log = (self.folder / "daemons.log").open("wb")

    def __enter__(self) -> "Cluster":
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if hasattr(self, "init"):
            self.init.stdin.close()
        for daemon in reversed(self.daemons):
            daemon.wait(PATIENCE)
        self.log.close()
        shutil.rmtree(self.folder)

    # -- actions of users and administrators ------------------------------------------------------

    def run(
        self, *command: str, cwd: Path | None = None, check: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, in the environment of a new login."""
        return subprocess.run(
            [*self.enter, f"--wd={cwd or self.folder}", "--", *command],
            env={**self.environment, **env},
            capture_output=True,
            text=True,
            check=check,
            timeout=PATIENCE,
        )

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Stop Slurm's controller from answering during the `with` block."""
        waiting = [psutil.Process(daemon.pid) for daemon in self.daemons]
        inside = [child for each in waiting for child in each.children(recursive=True)]
        (controller,) = (each for each in inside if each.name() == "slurmctld")
        controller.suspend()
        try:
            yield
        finally:
            controller.resume()
            # nsenter suspends itself when the process that it waits for is suspended.
            for process in waiting:
                process.resume()

    def cut_off(self, node: str) -> None:
        """Disconnect a node from the network; its processes continue."""
        self.run("ip", "link", "set", f"to-{node}", "down")

    def mend(self, node: str) -> None:
        """Connect a node again, and wait until Slurm can start jobs on it."""
        self.run("ip", "link", "set", f"to-{node}", "up")
        self.wait_until_idle(node)

    @property
    def version(self) -> str:
        """Slurm's version, such as 24.11.5."""
        return self.run("sinfo", "--version").stdout.split()[-1]

    def wait_until_idle(self, *nodes: str) -> None:
        """Wait until nodes are up and have no jobs."""
        names = ",".join(nodes or self.nodes)

        def states() -> set[str]:
            shown = self.run("sinfo", "--noheader", "--Node", f"--nodes={names}", "--format=%T")
            return set(shown.stdout.split())

        wait_for(lambda: states() == {"idle"}, lambda: f"nodes are {states()}\n{self.logs}", 0.2)

    @property
    def logs(self) -> str:
        """The last lines of the logs of all daemons."""
        return "\n".join(
            f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in sorted(self.folder.glob("*.log"))
        )

    def said_of(self, job: str) -> str:
        """Return what the daemons logged about a job."""
        return self.run(
            *("grep", "--no-filename", "--extended-regexp"),
            rf"(JobId=|job |\[|job0*){job}\b",
            *map(str, sorted(self.folder.glob("slurm*.log"))),
            check=False,
        ).stdout

    def seen_by_nodes(self, path: Path) -> Path:
        """Return where this process finds a path that is mounted only on the nodes."""
        return Path(f"/proc/{self.root_process}/root{path}")

    # -- start of the cluster ---------------------------------------------------------------------

    def _start(self) -> None:
        self.folder.chmod(0o755)
        self.environment = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": os.environ.get("HOME", "/root"),
            "LANG": "C.UTF-8",
            "SLURM_CONF": f"{self.folder}/slurm.conf",
            **{name: os.environ[name] for name in COVERAGE if name in os.environ},
        }
        self._configure()
        self.init = subprocess.Popen(
            [
                *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--uts"),
                *("--mount", "--propagation=private"),
                # The first process must reap orphaned processes. A shell does this.
                *("bash", "-c", "echo ready; while read -r; do :; done"),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
        )
        self.daemons.append(self.init)
        assert self.init.stdout.readline() == b"ready\n", "namespaces are refused"
        (root_process,) = psutil.Process(self.init.pid).children()
        self.root_process = root_process.pid
        kinds = ["--pid", "--net", "--uts", "--mount"]
        self.enter = ["nsenter", f"--target={self.root_process}", *kinds]
        self.run(
            "bash",
            "-euc",
            f"""
            hostname login
            mount --bind {self.folder}/hosts /etc/hosts
            # Login shells of jobs do not run what this user's own shells start with. pyenv makes
            # each of them wait a minute if a job was killed while it held pyenv's lock.
            touch {self.folder}/empty
            for own in ~/.bash_profile ~/.bash_login ~/.profile ~/.bashrc; do
                [[ ! -e $own ]] || mount --bind {self.folder}/empty $own
            done
            mkdir {self.small}
            mount -t tmpfs -o size=8m tmpfs {self.small}
            ip link set lo up
            ip link add name bridge type bridge
            ip address add {SUBNET}.1/24 dev bridge
            ip link set bridge up
            """,
        )
        munge = self.folder / "munge"
        self._daemon(
            *("munged", "--foreground", "--force", f"--socket={munge}/socket"),
            *(f"--key-file={munge}/key", f"--pid-file={munge}/pid", f"--seed-file={munge}/seed"),
            f"--log-file={munge}/log",
        )
        wait_for((munge / "socket").exists, lambda: self.logs)
        if self.accounts:
            self._keep_accounts()
        self._daemon("slurmctld", "-D")
        for number, node in enumerate(self.nodes, 2):
            self._daemon(
                *("unshare", "--net", "--uts", "--mount", "--propagation=private"),
                *("bash", "-euc"),
                f"""
                hostname {node}
                {accounts.show_meter(self.folder, node) if self.accounts else ""}
                ip link set lo up
                echo $$ >{self.folder}/{node}.shell
                until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
                ip address add {SUBNET}.{number}/24 dev eth0
                ip link set eth0 up
                exec slurmd -D -N {node}
                """,
            )
        for node in self.nodes:
            pid = self.folder / f"{node}.shell"
            wait_for(lambda pid=pid: pid.exists() and pid.read_text(), lambda: self.logs)
            self.run(
                *("ip", "link", "add", f"to-{node}", "type", "veth"),
                *("peer", "name", "eth0", "netns", pid.read_text().strip()),
            )
            self.run("ip", "link", "set", f"to-{node}", "master", "bridge", "up")
        wait_for(
            lambda: self.run("scontrol", "ping", check=False).returncode == 0, lambda: self.logs
        )
        self.wait_until_idle()

    def _daemon(self, *command: str) -> None:
        self.daemons.append(
            subprocess.Popen(
                [*self.enter, "--", *command],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
            )
        )

    def _keep_accounts(self) -> None:
        socket = self.folder / "database.socket"
        self._daemon(*accounts.database(self.folder))
        wait_for(socket.exists, lambda: self.logs)
        self._daemon(*accounts.meter(self.folder))
        self._daemon("env", f"MYSQL_UNIX_PORT={socket}", "slurmdbd", "-D")

        def answers() -> bool:
            assert self.daemons[-1].poll() is None, f"slurmdbd has ended\n{self.logs}"
            return self.run("sacctmgr", "show", "cluster", check=False).returncode == 0

        wait_for(answers, lambda: self.logs)

    def _configure(self) -> None:
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for number in range(self.gpus):
            # Slurm only assigns GPUs to jobs, so a copy of the device /dev/null is enough.
            os.mknod(self.folder / f"gpu{number}", 0o666 | 0o020000, os.makedev(1, 3))
        addresses = {node: f"{SUBNET}.{number}" for number, node in enumerate(self.nodes, 2)}
        hosts = {"localhost": "127.0.0.1", "login": f"{SUBNET}.1", **addresses}
        devices = f"{self.folder}/gpu[0-{self.gpus - 1}]"
        files = {
            # Each node also has names for a fast network, as at some sites.
            "hosts": "".join(
                f"{address} {name} {name}-ib {name}i\n" for name, address in hosts.items()
            ),
            "cgroup.conf": cgroup_conf(),
            "gres.conf": f"Name=gpu Type=a100 File={devices}\n" if self.gpus else "",
            "slurm.conf": self._slurm_conf(addresses),
            "job_submit.lua": self.job_submit,
            "cli_filter.lua": self.cli_filter,
            "plugstack.conf": "" if pyxis.missing() else pyxis.build(self.folder),
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
        if self.accounts:
            accounts.configure(self.folder)

    def _slurm_conf(self, addresses: dict[str, str]) -> str:
        kind = f"Gres=gpu:a100:{self.gpus} Feature=a100,rack1" if self.gpus else "Feature=rack1"
        nodes = "\n".join(
            f"NodeName={node} NodeAddr={address} CPUs={self.cores} RealMemory={self.memory} {kind}"
            for node, address in addresses.items()
        )
        return f"""\
ClusterName=test
SlurmctldHost=login({SUBNET}.1)
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge/socket,cred_expire={5 if self.hasty else 120}
SlurmUser=root
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
# The nodes say that they have more than this machine.
SlurmdParameters=config_overrides
ReturnToService=2
MinJobAge=86400
SlurmdTimeout={5 if self.hasty else 300}
MessageTimeout={10 if self.hasty else 100}
KillWait=30
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0
SlurmctldParameters=enable_expedited_requeue
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{"JobSubmitPlugins=lua" if self.job_submit else ""}
{"CliFilterPlugins=lua" if self.cli_filter else ""}
{accounts.settings(self.folder) if self.accounts else ""}
{self.settings}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=1-00:00:00 PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL MaxTime=1-00:00:00 PriorityTier=10 PreemptMode=OFF
"""


def cgroup_conf() -> str:
    """Return the configuration for the version of cgroups on this machine."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    if any(kind == "cgroup" for _, _, kind, *_ in mounts):
        return "CgroupPlugin=cgroup/v1\n"
    return "CgroupPlugin=cgroup/v2\nIgnoreSystemd=yes\n"


def wait_for(
    condition: Callable[[], object], message: Callable[[], str], pause: float = 0.05
) -> None:
    """Wait until a condition is true; fail with the message if it takes too long.

    `pause` is in seconds. Between queries of Slurm, it should be longer: such a query costs as much
    CPU time as some steps of the training.
    """
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, message()
        time.sleep(pause)
