"""Runs rank 0 of a world of any size, with PyTorch's fake process group.

This process group does not communicate: it treats the values of this rank as those of all ranks. So
rank 0 has the same work, memory and files as in a real world, but waits for no other rank. Prints
its figures.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from demo import model, train
from demo.engine import shards
from demo.engine.data.steps import StepLoader
from demo.engine.data.stream import ShardStream
from demo.engine.epochs import Step
from demo.engine.nested import each_leaf
from demo.engine.position import Position
from demo.engine.ranks import process_group, strategy
from demo.engine.ranks.process_group import joined
from demo.engine.ranks.signals import StopRequest
from demo.engine.ranks.strategy import is_dtensor
from demo.engine.ranks.world import World
from demo.engine.run.record import RECORDER
from demo.engine.training import Training
from demo.settings import Settings
from plans import planning
from stopwatch import Clock, milliseconds, peak_mib, python_kib
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import Dataset

WHAT = os.environ["BENCHMARK_WHAT"]  # "parts", or the strategy of a training
SAMPLES, SHARDS, BATCH = 1_281_167, 8192, 32
MANY = 10_000_000  # samples of an epoch that is resumed
ROWS, WIDTH, BLOCKS = 4096, 512, 4  # each layer has at least as many rows as there are ranks
MIB = 2**20
STEPS: list[float] = []  # milliseconds of each step of a training

Figures = dict[str, float]


class Indices(Dataset):
    """A dataset whose samples are their indices; as many as in ImageNet."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        return torch.as_tensor(indices), torch.as_tensor(indices)

    @staticmethod
    def collate(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the batch that `__getitems__` has made."""
        return batch


def read(shard: int, samples: int = SAMPLES // SHARDS) -> Iterator[tuple[int, int]]:
    """Yield the samples of a shard."""
    return ((shard, number) for number in range(samples))


class Block(nn.Linear):
    """A layer of 8 MiB with many rows."""

    def __init__(self) -> None:
        super().__init__(WIDTH, ROWS)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).unflatten(-1, (-1, WIDTH)).sum(-2)


def measured(training: Training, step: Step, take: Callable[..., None] = train.train_step) -> None:
    """Take a step. The peak memory is measured from the first step on, without the set-up."""
    if not training.position.step:
        Path("/proc/self/clear_refs").write_text("5")
    clock = Clock()
    with clock:
        take(training, step)
    STEPS.append(clock.ms)


def pretend() -> None:
    """Replace all process groups by fake ones, with right sums, and with a hook that DDP needs."""
    init, new, reduce = dist.init_process_group, dist.new_group, dist.all_reduce

    def join(_backend: str, *, rank: int, world_size: int, **_: object) -> None:
        init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def sum_of_equals(tensor: Tensor, op: object = dist.ReduceOp.SUM, **options: object) -> object:
        if op == dist.ReduceOp.SUM:
            tensor *= dist.get_world_size()
        return reduce(tensor, op, **options)

    def unreduced(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    class Hooked(DistributedDataParallel):
        @wraps(DistributedDataParallel.__init__)
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)
            self.register_comm_hook(None, unreduced)

    dist.init_process_group, dist.all_reduce = join, sum_of_equals
    dist.new_group = lambda **_: new(backend="fake")
    dist.rendezvous = lambda *_, **__: iter([(Facts(), 0, 1)])
    process_group.wait_for_all = lambda *_: None
    strategy.DistributedDataParallel = Hooked


class Facts(dist.HashStore):
    """A store in which all ranks have told what rank 0 has."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the value of the first key for each."""
        return [self.get(keys[0])] * len(keys)


def joining() -> tuple[World, Figures]:
    """Measure joining the ranks; return the world too."""
    blocks: list[AbstractContextManager[World]] = []

    def join() -> World:
        blocks.append(joined(Settings.parse(["--device=cpu"])))
        return blocks[-1].__enter__()

    def leave() -> None:
        blocks.pop().__exit__(None, None, None)

    join()  # the first time, it imports modules
    leave()
    kib = python_kib(join)
    leave()
    clock = Clock()
    with clock:
        world = join()
    return world, {"join ms": clock.ms, "join KiB": kib}


def sharding(world: World) -> Figures:
    """Measure the start of an epoch, up to its first batch, by index and as a stream."""
    figures, settings = {}, Settings(batch_size=BATCH, workers=0, seed=0)
    for name, make in {
        "index": Indices,
        "stream": lambda: ShardStream(range(SHARDS), read, SAMPLES),
    }.items():

        def first(make: Callable[[], Dataset] = make) -> object:
            return next(StepLoader(make(), settings, world, None).epoch(Position()))

        figures[f"{name} ms"] = milliseconds(first)
        figures[f"{name} KiB"] = python_kib(first)
    return figures


def resuming(world: World) -> Figures:
    """Measure a resume at nine tenths of a long epoch, up to the first batch, in both ways."""
    figures, settings = {}, Settings(batch_size=BATCH, workers=0, seed=0)
    had, each = MANY * 9 // 10 // (BATCH * world.size), MANY // SHARDS
    for name, make in {
        "index": lambda: Indices(MANY),
        "stream": lambda: ShardStream(
            range(SHARDS), partial(read, samples=each), sizes=[each] * SHARDS
        ),
    }.items():

        def first(make: Callable[[], Dataset] = make) -> object:
            loader = StepLoader(make(), settings, world, None)
            position = Position(epoch_steps=had, consumed=had * BATCH * world.size)
            return next(loader.epoch(position))

        figures[f"{name} resumed ms"] = milliseconds(first)
    return figures


def spreading(world: World, settings: Settings) -> tuple[dict[str, Any], Figures]:
    """Distribute a network and take a step; also return the state that a checkpoint saves."""
    learner = model.Model(settings)
    for _ in range(2):  # the first time, it imports modules
        network = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        clock = Clock()
        with clock:
            called = strategy.distribute(network, learner.fsdp_units, settings, world)
    optimizer = learner.optimizers(network)
    called(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    state = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
    held = 0

    def weigh(_: object, leaf: Any) -> None:  # noqa: ANN401 - whatever a state holds
        nonlocal held
        if isinstance(leaf, Tensor):
            held += (leaf.to_local() if is_dtensor(leaf) else leaf).nbytes

    each_leaf(weigh, state)
    name = settings.strategy
    return state, {f"{name} ms": clock.ms, f"{name} MiB": held / MIB}


def reducing(world: World) -> Figures:
    """Measure the reduction of a dozen numbers over all ranks, for a line of the log."""

    def read() -> None:
        for number in range(12):
            RECORDER.add(f"train/number_{number}", number / 7, 1)
        RECORDER.read(world)

    return {"log ms": milliseconds(read)}


def parts() -> Figures:
    """Return the figures of all parts of a training."""
    world, figures = joining()
    figures |= sharding(world) | resuming(world) | reducing(world)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("ddp", "fsdp"):
            state, more = spreading(world, Settings.parse(["--device=cpu", f"--strategy={name}"]))
            figures |= more
        return figures | planning(state, world.size, Path(folder))


def write_list(folder: Path, *_: object) -> list[str]:
    """Write an empty list of shards: the real function would wait for the plans of other ranks."""
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    return [f"{'0' * 64}  {folder.stem}/.metadata"]


def training() -> Figures:
    """Train the example; return the figures of the rank, its files and its log."""
    train.train_step = measured
    shards.write = write_list
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--device=cpu", "--dataset=synthetic", "--batch-size=2", "--max-steps=20"]
        flags += ["--epochs=20", "--log-every=10", "--trackers=none", f"--run-dir={folder}"]
        if train.run(Settings.parse([*flags, f"--strategy={WHAT}"]), StopRequest.install()):
            raise SystemExit("the training did not end")
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        saved = [path for path in files if path.parent.name == "checkpoints"]
        logged = [
            next(
                line for line in Path(folder, name).read_text().splitlines() if "train/loss" in line
            )
            for name in ("metrics.jsonl", "log.txt")
        ]
        once = ("provenance.json", "summary.json", "config.yaml")
        summary = json.loads(Path(folder, "summary.json").read_text())
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
        evaluations = sum("validation/loss" in line or "test/loss" in line for line in lines)
        return {
            "step ms": min(STEPS),  # without the thread that writes a checkpoint beside it
            "evaluation ms": 1000 * summary["usage"]["seconds"]["validation"] / evaluations,
            "peak MiB": peak_mib(),
            "line bytes": sum(len(line) + 1 for line in logged),
            "files": len(files) - len(saved),
            "written once KiB": sum(Path(folder, name).stat().st_size for name in once) / 1024,
        }


pretend()
print(json.dumps(parts() if WHAT == "parts" else training()), flush=True)
os._exit(0)
