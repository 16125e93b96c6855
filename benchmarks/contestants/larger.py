"""Trains the example `text` with many blocks; prints the memory of rank 0 and the time of a step.

With BENCHMARK_WORLD, it runs rank 0 of so many ranks, with PyTorch's fake process group, which does
not communicate. Without it, the ranks are real. In both cases, FSDP sees two nodes, each with half
of the ranks.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.fsdp  # imported with DDP too, so that `before` includes it
from demo.engine.data.steps import Loaded
from demo.engine.networks import Networks
from demo.engine.ranks.process_group import joined
from demo.engine.ranks.world import World
from demo.engine.updater import Updater
from demo.model import Model
from demo.settings import Settings
from stopwatch import peak_mib

WORLD = os.environ.get("BENCHMARK_WORLD")
STEPS, BATCH, CONTEXT = 3, 8, 128
NETWORK = ["--layers=12", "--width=384", "--heads=6", f"--context={CONTEXT}", "--dropout=0"]


@contextmanager
def played(size: int) -> Iterator[World]:
    """Yield the world of rank 0 with a fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    yield World(0, size, 0, "none", torch.device("cpu"), "fake", (), dist.group.WORLD)


def main() -> None:
    """Take some steps. The first one makes the optimizer's state."""
    settings = Settings.parse([*NETWORK, "--device=cpu", *sys.argv[1:]])
    learner = Model(settings)
    clear = Path("/proc/self/clear_refs")
    with played(int(WORLD)) if WORLD else joined(settings) as world:
        clear.write_text("5")  # resets the peak memory of this process
        before = peak_mib()
        nodes = tuple("ab"[2 * rank // world.size] for rank in range(world.size))
        world = replace(world, nodes=nodes)
        networks = Networks(learner, settings, world, resumes=False)
        updater = Updater(networks, settings, world)
        tokens = torch.randint(256, (BATCH, CONTEXT + 1))
        batch = Loaded((tokens[:, :-1], tokens[:, 1:]), BATCH, BATCH * CONTEXT)
        seconds = []
        clear.write_text("5")
        for _ in range(STEPS):
            began = time.perf_counter()
            updater.begin([batch], BATCH * CONTEXT * world.size, measure_norm=False)
            updater.update(learner.loss)
            seconds.append(time.perf_counter() - began)
        figures = {"MiB": peak_mib() - before, "step ms": 1000 * statistics.median(seconds[1:])}
        if world.is_main:
            print(json.dumps(figures), flush=True)
    os._exit(0)


main()
