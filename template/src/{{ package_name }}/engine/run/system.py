"""What a rank takes of its machine: memory, processor, GPU."""

from contextlib import suppress

import psutil
import torch

from .record import Store

GIB = 2**30
PROCESS = psutil.Process()


def record_usage(store: Store, device: torch.device) -> None:
    """Record this rank's usage; of memory, the rank that has most is the one that counts.

    `cpu_percent` is of one core, since the last call, so a rank with four busy threads has 400.
    """
    store.record("system/memory_gib", PROCESS.memory_info().rss / GIB, "max")
    store.record("system/cpu_percent", PROCESS.cpu_percent())
    if device.type == "cuda":
        store.record("system/gpu_memory_gib", torch.cuda.max_memory_reserved(device) / GIB, "max")
        # Needs the package nvidia-ml-py, and a driver that tells.
        with suppress(ImportError, RuntimeError, AttributeError):
            store.record("system/gpu_percent", float(torch.cuda.utilization(device)))
