"""Samples the resources of the node and the GPU that this rank uses."""

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

from ...engine.ranks.device import BACKENDS, gpu_properties
from ...engine.ranks.environment import Ranks
from ...engine.run.clock import CLOCK
from ...engine.run.record import record
from .costs import Rank

GIB = 2**30
INTERVAL = 10  # seconds between two samples of all processes, which take milliseconds
PROCESS = psutil.Process()


class Machine:
    """Samples the usage of this rank in a thread, since some GPU libraries take 0.1 s to answer.

    Attributes:
        after: a function that the thread calls every INTERVAL seconds.
    """

    def __init__(self, device: torch.device) -> None:
        PROCESS.cpu_percent()  # the first answer is always 0
        self.device = device
        self.after: Callable[[], object] = lambda: None
        self.gpu: Any = torch.get_device_module(device.type) if device.type in BACKENDS else None
        self.seconds = self.cpu_seconds = self.gib = self.node_gib = self.node_limit_gib = 0.0
        self.busy: list[float] = []  # samples of the GPU's utilization, in percent
        self.watts: list[float] = []
        self.logged = 0  # how many samples of `busy` were in log lines
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="machine", daemon=True)
        self.thread.start()

    def describe(self) -> Rank:
        """Return the usage of this rank at the last sample, and its limits."""
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

    def record(self) -> None:
        """Record the usage of memory, CPU and GPU: means over ranks, but the maximum of memory."""
        record("system/memory_gib", PROCESS.memory_info().rss / GIB, "max")
        # In percent of one core since the last call: four busy threads give 400.
        record("system/cpu_percent", PROCESS.cpu_percent())
        if self.gpu:
            record("system/gpu_memory_gib", self.gpu.max_memory_reserved(self.device) / GIB, "max")
        if (percent := self.gpu_percent()) is not None:
            record("system/gpu_percent", percent)

    def gpu_percent(self) -> float | None:
        """Return the mean utilization of the GPU since the last call, None if it is unknown."""
        new = self.busy[self.logged :] or self.busy[-1:]
        self.logged = len(self.busy)
        return _mean(new) if new else None

    def sample(self) -> None:
        """Sample CPU time and memory; any thread may call this."""
        self.seconds = time.time() - PROCESS.create_time()
        seconds, memory = 0.0, 0
        with suppress(psutil.Error):  # a child process may end meanwhile
            seconds, memory = sum(PROCESS.cpu_times()[:4]), _peak()  # includes ended children
            for each in PROCESS.children(recursive=True):
                seconds += sum(each.cpu_times()[:4])
                memory += each.memory_full_info().uss  # without memory that it shares
        self.cpu_seconds, self.gib = max(self.cpu_seconds, seconds), max(self.gib, memory / GIB)
        if found := cgroup_memory():
            self.node_gib, self.node_limit_gib = max(self.node_gib, found[0]), found[1]

    def close(self) -> None:
        """End the thread."""
        self.closed.set()
        self.thread.join(5)  # if a GPU is lost, its library may never answer

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
        # The vendor's library may be missing or refuse access, with any class of exception.
        with suppress(Exception):
            self.busy.append(float(self.gpu.utilization(self.device)))
        with suppress(Exception):
            unit = 1000 if self.device.type == "cuda" else 1  # torch gives mW on cuda, W on xpu
            self.watts.append(self.gpu.power_draw(self.device) / unit)


def _mean(samples: list[float]) -> float:
    return sum(samples) / max(len(samples), 1)


def _peak() -> int:
    """Return the peak memory of this process in bytes; except on Linux, its current memory."""
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text("utf-8")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return int(PROCESS.memory_info().rss)


def cgroup_memory(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> tuple[float, float] | None:
    """Return the memory in use and the limit, both in GiB, of the innermost cgroup with a limit.

    Slurm uses cgroups of version 1 or 2 to limit the memory of jobs and steps. Cached files that
    the kernel can drop at once do not count.
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
                # Without a limit, the file has a word or a huge number.
                with suppress(OSError, ValueError):
                    limit = int((each / limit_file).read_text("utf-8"))
                    if limit < psutil.virtual_memory().total:
                        stat = (each / "memory.stat").read_text("utf-8").split()
                        used = int((each / used_file).read_text("utf-8"))
                        used -= int(stat[stat.index(dropped) + 1])
                        return used / GIB, limit / GIB
    return None
