"""Measures the time and the memory of a call."""

import gc
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path


class Clock:
    """Milliseconds spent in `with` blocks, without garbage collection, as in timeit."""

    ms = 0.0

    def __enter__(self) -> None:
        gc.disable()
        self.began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.ms += 1000 * (time.perf_counter() - self.began)
        gc.enable()


def milliseconds(function: Callable[[], object]) -> float:
    """Return the milliseconds of a second call, because the first one imports modules."""
    function()
    clock = Clock()
    with clock:
        function()
    return clock.ms


def python_kib(function: Callable[[], object]) -> float:
    """Return the peak memory of Python objects in a call, in KiB, without tensors."""
    tracemalloc.start()
    function()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1024


def peak_mib() -> float:
    """Return the peak memory of this process, in MiB. `resource` would include its parent's."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
