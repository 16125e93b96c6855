"""What this rank uses of its node and its GPU, beside what it may use."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from ..ranks.device import BACKENDS, gpu_properties
from ..ranks.environment import Ranks
from .clock import CLOCK
from .usage import Rank

GIB = 2**30
INTERVAL = 10  # seconds between two looks at all processes, which take milliseconds
PROCESS = psutil.Process()


class Machine:
    """Samples what this rank uses, in a thread, as some libraries of GPUs take 0.1 s to answer.

    Attributes:
        after: called in the thread every INTERVAL.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.after: Callable[[], object] = lambda: None
        self.gpu: Any = torch.get_device_module(device.type) if device.type in BACKENDS else None
        self.seconds = self.cpu_seconds = self.gib = self.node_gib = self.node_limit_gib = 0.0
        self.busy: list[float] = []  # samples: percent of the time
        self.watts: list[float] = []
        self.logged = 0  # samples of `busy` that log lines have had
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="machine", daemon=True)
        self.thread.start()

    def describe(self) -> Rank:
        """Return what this rank had used at the last sample, and what it may use."""
        gpu: Any = gpu_properties(self.device)
        return Rank(
            host=socket.gethostname(),
            seconds=self.seconds,
            cpus=Ranks.from_environment(os.environ).cpus(os.environ),
            cpu_seconds=self.cpu_seconds,
            data_seconds=CLOCK.read()["data"],
            gib=self.gib,
            node_gib=self.node_gib,
            node_limit_gib=self.node_limit_gib,
            gpu=gpu.name if gpu else "",
            gpus=int(os.environ.get("SLURM_GPUS_ON_NODE") or 0),
            gpu_seconds=self.seconds * _mean(self.busy) / 100,
            gpu_joules=self.seconds * _mean(self.watts),
            gpu_gib=self.gpu.max_memory_reserved(self.device) / GIB if gpu else 0,
            gpu_limit_gib=gpu.total_memory / GIB if gpu else 0,
        )

    def gpu_percent(self) -> float | None:
        """Return the mean use of the GPU since the last call, None if it is unknown."""
        new = self.busy[self.logged :] or self.busy[-1:]
        self.logged = len(self.busy)
        return _mean(new) if new else None

    def sample(self) -> None:
        """Note the processors and the memory in use; any thread may call this."""
        self.seconds = time.time() - PROCESS.create_time()
        seconds, memory = 0.0, 0
        with suppress(psutil.Error):  # they may end meanwhile
            seconds, memory = sum(PROCESS.cpu_times()[:4]), _peak()  # with ended children's
            for each in PROCESS.children(recursive=True):
                seconds += sum(each.cpu_times()[:4])
                memory += each.memory_full_info().uss  # without what it shares with this rank
        self.cpu_seconds, self.gib = max(self.cpu_seconds, seconds), max(self.gib, memory / GIB)
        if found := cgroup_memory():
            self.node_gib, self.node_limit_gib = max(self.node_gib, found[0]), found[1]

    def close(self) -> None:
        """End the thread."""
        self.closed.set()
        self.thread.join(5)  # the library of a GPU that is lost may never answer

    def _watch(self) -> None:
        second = 0
        while not self.closed.wait(1.0):
            if self.gpu:
                self._sample_gpu()
            if second % INTERVAL == 0:
                self.sample()
                self.after()
            second += 1

    def _sample_gpu(self) -> None:
        # Whatever the vendor's library raises: it may lack a function, or a permission.
        with suppress(Exception):
            self.busy.append(float(self.gpu.utilization(self.device)))
        with suppress(Exception):
            unit = 1000 if self.device.type == "cuda" else 1  # mW, but W on XPU
            self.watts.append(self.gpu.power_draw(self.device) / unit)


def _mean(samples: list[float]) -> float:
    return sum(samples) / max(len(samples), 1)


def _peak() -> int:
    """Return the most bytes of memory that this process had; on Linux, else what it has."""
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text("utf-8")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return int(PROCESS.memory_info().rss)


def cgroup_memory(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[float, float] | None:
    """Return the memory in use and its limit in GiB, of the innermost cgroup that has a limit.

    Memory of files that the kernel can drop at once does not count. Slurm limits the memory of jobs
    and steps so, with either version of cgroups:
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    versions = {
        "memory": (root / "memory", *names),
        "": (root, "memory.max", "memory.current", "inactive_file"),
    }
    with suppress(OSError, ValueError):
        for line in groups.read_text("utf-8").splitlines():
            _, controller, path = line.split(":", 2)
            if controller not in versions:
                continue
            base, limit_file, used_file, dropped = versions[controller]
            folder = Path(f"{base}{path}")
            for each in (folder, *folder.parents):
                # Those above have limits of other things. Without a limit, it is a word or huge.
                with suppress(OSError, ValueError):
                    limit = int((each / limit_file).read_text("utf-8"))
                    if limit < psutil.virtual_memory().total:
                        stat = (each / "memory.stat").read_text("utf-8").split()
                        used = int((each / used_file).read_text("utf-8"))
                        used -= int(stat[stat.index(dropped) + 1])
                        return used / GIB, limit / GIB
    return None
