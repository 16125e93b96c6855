"""Each sample goes to one rank, and files are read and downloaded completely or not at all."""

import gzip
import hashlib
import http.server
import os
import random
import re
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from .conftest import edited, srun
from .samples import LOCK, Drawing, draws, noted, twenty, uneven


class Loader:
    """A rank's loader, which yields the batches of an epoch with their numbers of samples."""

    def __init__(
        self, dataset: Dataset, batch_size: int, rank: int, ranks: int, seed: int, workers: int
    ) -> None:
        from demo.engine.data.steps import StepLoader

        settings: Any = SimpleNamespace(
            batch_size=batch_size,
            accumulate=1,
            seed=seed,
            workers=workers,
            epochs=9,
            max_steps=None,
        )
        world: Any = SimpleNamespace(rank=rank, size=ranks, device=torch.device("cpu"))
        self.steps = StepLoader(dataset, settings, world, None)
        self.close, self.spare = self.steps.close, self.steps.spare

    def epoch(self, epoch: int, consumed: int = 0, batches: int = 0) -> Iterator[tuple[int, Any]]:
        from demo.engine.position import Position

        position = Position(epoch=epoch, consumed=consumed, epoch_steps=batches)
        for loaded in takewhile(len, self.steps.epoch(position)):
            for batch, samples, _ in loaded:
                yield samples, batch

    def numbers(self, epoch: int) -> list[int]:
        """Return all samples of an epoch, if they are numbers."""
        return [int(number) for _, batch in self.epoch(epoch) for number in batch]


def order(project: Path, ranks: int, epoch: int, consumed: int = 0) -> list[int]:
    """Return the indices that all ranks together train on, step by step."""
    from demo.engine.data.batches import EpochSampler
    from demo.engine.position import Place

    samplers = [EpochSampler(1003, 25, rank, ranks, seed=5) for rank in range(ranks)]
    for sampler in samplers:
        sampler.consumed, sampler.place = consumed, lambda batch: Place(epoch, batch, 0.0)
    batches = list(zip(*samplers, strict=True))
    keys = [key for step in batches for batch in step for key in batch]
    assert {place.epoch for place, _, _ in keys} == {epoch}
    return [index for _, _, index in keys]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_one_order_of_the_samples(project: Path, ranks: int) -> None:
    whole = order(project, ranks, epoch=0)
    assert len(whole) == len(set(whole)) == 1000
    assert whole == order(project, 1, epoch=0), "the order is the same on any world size"
    assert whole != order(project, ranks, epoch=1)
    assert set(whole) != set(order(project, ranks, epoch=1)), "another few are left out"
    # Where one world stopped, another goes on.
    assert order(project, ranks, epoch=0, consumed=300) == whole[300:]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (2, 0), (4, 2), (7, 0)])
def test_a_stream_reads_each_sample_once(project: Path, ranks: int, workers: int) -> None:
    """Seven uneven shards: some ranks have more shards, and some workers have no shard."""

    seen: Counter[int] = Counter()
    orders = []
    for rank in range(ranks):
        mine = Loader(_stream(), 10, rank, ranks, seed=1, workers=workers).numbers(0)
        assert mine, "every rank has something"
        seen.update(mine)
        orders.append(mine)
    assert set(seen) == set(range(28 * 10)) and set(seen.values()) == {1}
    # Shuffled within and between shards, in another order each epoch, and the same in each run.
    batches = Loader(_stream(), 10, 0, ranks, seed=1, workers=workers)
    again, other = batches.numbers(0), batches.numbers(1)
    assert again == orders[0] != sorted(orders[0])
    assert other != again
    if ranks > 1:
        assert set(other) != set(again), "ranks exchange shards"


def test_a_stream_shuffles_within_a_shard(project: Path) -> None:
    from demo.engine import ShardStream

    shard = ShardStream([0], lambda _: iter(range(200)), shuffle=50)
    read = Loader(shard, 200, 0, 1, seed=1, workers=0).numbers(0)
    assert sorted(read) == list(range(200))
    assert sum(abs(after - before) == 1 for before, after in pairwise(read)) < 50


@pytest.mark.parametrize("sizes", [None, [10 * (shard + 1) for shard in range(7)]])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_stream_goes_on_without_decoding_what_it_had(
    project: Path, tmp_path: Path, workers: int, sizes: list[int] | None
) -> None:
    from demo.engine.data.stream import ShardStream

    def left(had: int) -> tuple[list[list[float]], int, Any]:
        """Return the batches that are left, how many samples were decoded, and the spare batch."""
        log = tmp_path / f"{workers}-{had}"
        log.touch()
        decode = partial(noted, log)
        # Those of all samples, by a stream that knows no sizes.
        known = sizes if had else None
        stream = ShardStream(range(7), uneven, shuffle=30, decode=decode, sizes=known)
        loaded = Loader(stream, 10, 0, 2, seed=1, workers=workers)
        found = [batch.tolist() for _, batch in loaded.epoch(0, consumed=had, batches=had)]
        return found, log.stat().st_size, loaded.spare().tolist()

    whole, samples, _ = left(0)
    assert samples == sum(map(len, whole)) and len(whole) > 10
    # To start workers takes long.
    some = {
        0: (1, 4, 7, len(whole) - 1, len(whole), len(whole) + 1),
        1: (4, len(whole)),
        3: (4, 9),
    }
    for had in some[workers]:
        rest, decoded, spare = left(had)
        assert rest == whole[had:]
        if had < len(whole):
            # Of three workers, each skips a batch at least.
            assert decoded <= samples - 30 if workers == 3 else decoded == sum(map(len, rest))
        assert spare == whole[0], "the same one, however often the run was stopped"


def _double(number: float) -> float:
    return 2 * number + random.random()


@pytest.mark.parametrize("decode", [None, _double])
def test_a_stream_of_known_sizes_reads_no_shard_that_it_was_through_with(
    project: Path, decode: Callable[[float], float] | None
) -> None:
    from demo.engine.data.stream import ShardStream

    read: list[int] = []

    def samples(shard: int) -> Iterator[float]:
        read.append(shard)
        for number in range(20):
            yield shard * 20 + number + random.random()

    def left(had: int) -> tuple[list[Any], list[int]]:
        read.clear()
        stream = ShardStream(range(100), samples, None, 8, decode, sizes=[20] * 100)
        stream.assign(1, 2, seed=3)
        stream.set_epoch(4, skip=had)
        assert stream.length == 2000
        return list(stream)[had:], list(read)

    whole, shards = left(0)
    assert len(whole) == 1000 and len(shards) == 50
    for had in (1, 300, 500, 992, 999):
        rest, opened = left(had)
        assert rest == whole[had:]
        # Those of which something is held back, and then the rest.
        assert len(opened) <= 50 - had // 20 + 3 and len(set(opened)) == len(opened)
    assert left(1000) == ([], []) and left(2000) == ([], [])


@pytest.mark.parametrize(("sizes", "workers"), [([19, 19], 0), ([21, 21], 0), ([21, 21], 1)])
def test_wrong_sizes_of_shards_are_an_error(project: Path, sizes: list[int], workers: int) -> None:
    from demo.engine.data.stream import ShardStream
    from demo.engine.errors import UsageError

    for had in (0, 2, 7):
        stream = ShardStream(range(2), twenty, shuffle=8, sizes=sizes)
        batches = Loader(stream, 5, 0, 1, seed=1, workers=workers)
        with pytest.raises(UsageError, match=r"^shard \d has 20 sample.s., not (19|21) as [^\n]*$"):
            list(batches.epoch(0, batches=had))
    with pytest.raises(UsageError, match=r"7 shard.s., but 2 sizes"):
        ShardStream(range(7), twenty, sizes=sizes).assign(0, 1, seed=0)


@pytest.mark.parametrize("kind", ["by index", "stream"])
def test_a_sample_draws_the_same_numbers_whoever_reads_it(project: Path, kind: str) -> None:
    from demo.engine.data.stream import ShardStream

    def drawn(ranks: int, workers: int, epoch: int = 0, seed: int = 1) -> dict[int, list[float]]:
        """Return the random numbers of each sample, by its index."""
        found = {}
        for rank in range(ranks):
            dataset = ShardStream(range(12), draws) if kind == "stream" else Drawing()
            batches = Loader(dataset, 10, rank, ranks, seed, workers)
            for _, batch in batches.epoch(epoch):
                found |= {
                    int(number): [float(each) for each in values]
                    for number, *values in zip(*batch, strict=True)
                }
            batches.close()
        return found

    alone = drawn(1, 0)
    assert len(alone) == 120
    assert len({value for values in alone.values() for value in values}) == 3 * 120
    random.seed(5)
    assert drawn(1, 0) == drawn(1, 3) == drawn(2, 0) == drawn(3, 1) == alone
    for other in (drawn(1, 0, epoch=1), drawn(1, 1, seed=2)):
        assert not {each[0] for each in other.values()} & {each[0] for each in alone.values()}


class Singles(Dataset):
    """Its `collate` gets a list of samples."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, torch.rand(()).item()

    @staticmethod
    def collate(samples: list[tuple[int, float]]) -> dict[str, list]:
        return {"index": [index for index, _ in samples], "drawn": [each for _, each in samples]}


class Wholes(Singles):
    """Its `collate` gets what `__getitems__` returned, a whole batch."""

    def __getitems__(self, indices: list[int]) -> tuple[list[int], list[float]]:
        return indices, [torch.rand(()).item() for _ in indices]

    @staticmethod
    def collate(batch: tuple[list[int], list[float]]) -> dict[str, list]:  # type: ignore[override]
        return dict(zip(("index", "drawn"), batch, strict=True))


WRAPPED: dict[str, Callable[[], Dataset]] = {
    "subset": lambda: Subset(Wholes(), range(40, 100)),
    "subset of singles": lambda: Subset(Singles(), range(40, 100)),
    "split": lambda: Subset(random_split(Wholes(), [100, 20])[0], range(60)),
    "joined": lambda: ConcatDataset([Singles(), Subset(Singles(), range(30))]),
    "subset of joined": lambda: Subset(ConcatDataset([Singles()]), range(20, 90)),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_dataset_makes_the_batches_of_its_own(project: Path, kind: str) -> None:
    from demo.engine.data.batches import evaluation_batches

    dataset: Any = WRAPPED[kind]()
    wanted = sorted(dataset[index][0] for index in range(len(dataset)))
    batches = [batch for _, batch in Loader(dataset, 10, 0, 1, seed=1, workers=0).epoch(0)]
    evaluated = list(evaluation_batches(dataset, range(len(dataset)), 10, 0))
    for found in (batches, evaluated):
        assert sorted(index for batch in found for index in batch["index"]) == wanted
    if "singles" in kind:  # each sample draws with a seed of its own, in any batch
        others = [batch for _, batch in Loader(dataset, 20, 0, 1, seed=1, workers=0).epoch(0)]
        drawn = [
            dict(zip(batch["index"], batch["drawn"], strict=True)) for batch in batches + others
        ]
        assert len({pair for each in drawn for pair in each.items()}) == len(dataset)


def test_joined_datasets_with_different_batches_are_refused(project: Path) -> None:
    from demo.engine.errors import UsageError

    class Other(Singles):
        collate = staticmethod(list)

    with pytest.raises(UsageError, match="different `collate`"):
        Loader(ConcatDataset([Singles(), Other()]), 10, 0, 1, seed=1, workers=0)


def test_workers_are_not_copies_of_a_rank_with_its_locks_held(project: Path) -> None:
    """A thread of the rank may hold any lock when workers start; a copy would wait forever."""

    batches = Loader(_stream(), 10, 0, 1, seed=1, workers=2)
    with LOCK:
        assert sum(samples for samples, _ in batches.epoch(0)) == 280


def test_a_dataset_that_workers_cannot_get_is_an_error(project: Path) -> None:
    from demo.engine.data.stream import ShardStream
    from demo.engine.errors import UsageError

    stream = ShardStream(range(7), lambda shard: iter([shard]), length=7)
    batches = Loader(stream, 1, 0, 1, seed=1, workers=1)
    with pytest.raises(UsageError, match=r"data.py: .*--workers 0"):
        next(batches.epoch(0))


def test_a_dataset_that_shared_memory_has_no_room_for_is_an_error(project: Path) -> None:
    """The limit of a file's size is as good as a small /dev/shm."""
    from demo.engine.errors import UsageError

    batches = Loader(TensorDataset(torch.zeros(100_000)), 1, 0, 1, seed=1, workers=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(UsageError, match="in /dev/shm"):
            next(batches.epoch(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_batch_that_a_worker_cannot_send_is_an_error(project: Path, tmp_path: Path) -> None:
    """As where /dev/shm is full by then: the rank must not wait for it. 1 is RLIMIT_FSIZE."""
    copy = edited(
        project,
        tmp_path,
        "data.py",
        "        chosen = torch.as_tensor(indices)\n",
        "        if torch.utils.data.get_worker_info():\n"
        "            __import__('resource').setrlimit(1, (2**16, 2**16))\n"
        "        chosen = torch.as_tensor(indices)\n",
    )
    job = srun(copy, tmp_path / "run", 1, "--workers=1").wait()
    assert job.codes == [1]
    assert "worker can't send" in job.log
    assert "loading worker ended" in job.log and "Traceback" not in job.log


def test_a_long_path_of_temporary_files_is_an_error(project: Path, tmp_path: Path) -> None:
    """The name of a socket has at most some hundred bytes."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    job = srun(project, tmp_path / "run", 1, "--workers=1", TMPDIR=str(long), PYTHONUNBUFFERED="1")
    job.wait()
    assert job.codes == [1]
    (line,) = [line for line in job.log.splitlines() if "[rank 0]" not in line]
    assert re.match("error: .* Digits of data.py: AF_UNIX path too long.*set TMPDIR", line)


def _stream():  # noqa: ANN202 - its type is the project's
    from demo.engine.data.stream import ShardStream

    return ShardStream(range(7), uneven, length=280, shuffle=30)


@pytest.mark.parametrize("ranks", [1, 2, 3, 12])
def test_evaluation_gives_each_sample_to_one_rank(project: Path, ranks: int) -> None:
    """And each rank as many batches; those that only keep others company do not count."""
    from demo.engine.evaluate import Evaluator

    settings: Any = SimpleNamespace(test_batch_size=2, workers=0)
    numbers, batches = [], set()
    for rank in range(ranks):
        world: Any = SimpleNamespace(rank=rank, size=ranks)
        evaluator = Evaluator(None, None, settings, world)  # type: ignore[arg-type]
        mine = list(evaluator._batches(list(range(11)), None))  # type: ignore[arg-type]
        numbers += [int(number) for batch, counts in mine if counts for number in batch]
        batches.add(len(mine))
    assert sorted(numbers) == list(range(11))
    assert len(batches) == 1


def test_data_that_ranks_cannot_share_is_an_error(project: Path) -> None:
    from demo.engine.data.batches import EpochSampler
    from demo.engine.errors import UsageError
    from torch.utils.data import IterableDataset

    class Endless(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield from ()

    with pytest.raises(UsageError, match="Endless, an iterable"):
        Loader(Endless(), 1, 0, 1, seed=0, workers=0)
    with pytest.raises(UsageError, match=r"7 shard.s. for 8 rank.s."):
        _stream().assign(0, 8, seed=0)
    with pytest.raises(UsageError, match="99 samples"):
        EpochSampler(99, 50, 0, 2, seed=0)


@pytest.fixture
def idx_files(project: Path, tmp_path: Path) -> Path:
    """A folder with four small files in MNIST's format, two plain and two packed."""
    folder = tmp_path / "idx"
    folder.mkdir()
    for part, count in (("train", 6), ("t10k", 3)):
        images = b"\0\0\x08\x03" + b"".join(n.to_bytes(4, "big") for n in (count, 28, 28))
        labels = b"\0\0\x08\x01" + count.to_bytes(4, "big")
        pixels = bytes(number % 251 for number in range(count * 784))
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images + pixels)
        packed = gzip.compress(labels + bytes(range(count)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(packed)
    return folder


def test_idx_files_are_read_plain_and_packed(project: Path, idx_files: Path) -> None:
    from demo.mnist import read

    images, labels = read(idx_files, "train")
    assert images.shape == (6, 28, 28) and labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert images.flatten()[:300].tolist() == [number % 251 for number in range(300)]


def test_digits_are_normalized_as_mnist_needs_it(project: Path) -> None:
    """The mean of the pixels of MNIST's training set is 33.32, their deviation 78.57."""
    from demo.data import Digits

    images = torch.tensor([33, 112], dtype=torch.uint8)[:, None, None].expand(2, 28, 28)
    digits = Digits(images, torch.zeros(2, dtype=torch.int64))
    assert digits[0][0].mean().item() == pytest.approx(0, abs=0.01)
    assert digits[1][0].mean().item() == pytest.approx(1, abs=0.01)


def test_damaged_files_are_refused(project: Path, idx_files: Path) -> None:
    from demo.engine.errors import UsageError
    from demo.mnist import read

    images = idx_files / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:-1])
    with pytest.raises(UsageError, match="damaged"):
        read(idx_files, "train")
    labels = idx_files / "t10k-labels-idx1-ubyte.gz"
    labels.write_bytes(labels.read_bytes()[:-9])
    with pytest.raises(UsageError, match="is damaged"):
        read(idx_files, "t10k")
    # Changed in the middle, where only unpacking notices.
    content = bytearray(gzip.compress(bytes(range(250)) * 40))
    content[30:60] = bytes(30)
    labels.write_bytes(content)
    with pytest.raises(UsageError, match="is damaged"):
        read(idx_files, "t10k")
    labels.unlink()
    for there in (False, True):
        if there:
            os.mkfifo(labels)
        with pytest.raises(UsageError, match=r"no t10k-labels-idx1-ubyte\[.gz\]"):
            read(idx_files, "t10k")
    # More than it may have, in few bytes.
    labels.unlink()
    labels.write_bytes(gzip.compress(bytes(2**28 + 1), compresslevel=1))
    with pytest.raises(UsageError, match="more than 268435456 bytes"):
        read(idx_files, "t10k")


@pytest.fixture
def mirror(idx_files: Path) -> Iterator[str]:
    """A server on this machine that has the files, all packed."""
    site = idx_files.with_name("site")
    site.mkdir()
    for path in idx_files.iterdir():
        content = path.read_bytes()
        packed = content if path.suffix == ".gz" else gzip.compress(content)
        (site / path.with_suffix(".gz").name).write_bytes(packed)
    handler = partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


ANSWER = b"HTTP/1.1 200 OK\r\n"
# What a bad server answers, by the first folder of the address, and what is said of it.
FAULTS = {
    "no-status": (b"\x1b[2Jnonsense\r\n\r\n", "nonsense"),
    "no-answer": (b"", "closed connection"),
    "cut": (ANSWER + b"Content-Length: 99\r\n\r\ncut", ""),
    "bad-chunk": (ANSWER + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", ""),
    "other": (ANSWER + b"\r\n" + gzip.compress(bytes(2_000)), "checksum"),
    "page": (ANSWER + b"\r\n<html>", "checksum"),
}


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        folder = self.path.split("/")[1]
        if folder in FAULTS:
            self.wfile.write(FAULTS[folder][0])
        else:
            super().do_GET()


@pytest.fixture
def checksums(idx_files: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Let the small files be the right ones."""
    from demo import mnist

    right = {
        name: hashlib.sha256(
            mnist.unpacked(mnist.stored(idx_files / name).read_bytes())
        ).hexdigest()
        for name in mnist.CHECKSUMS
    }
    monkeypatch.setattr(mnist, "CHECKSUMS", right)
    return right


def test_download_fetches_what_is_missing(
    mirror: str, checksums: dict[str, str], tmp_path: Path
) -> None:
    from demo.mnist import download, read

    target = tmp_path / "data"
    download(target, mirror)
    assert len(list(target.iterdir())) == 4
    assert read(target, "train")[0].shape == (6, 28, 28)
    # Once they are there, nothing is fetched.
    download(target, "http://127.0.0.1:1/")
    (target / "train-labels-idx1-ubyte.gz").unlink()
    download(target, mirror)
    assert read(target, "train")[1].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_download_is_one_line_and_leaves_nothing_behind(
    mirror: str, checksums: dict[str, str], tmp_path: Path, fault: str
) -> None:
    from demo import mnist
    from demo.engine.errors import UsageError

    target = tmp_path / "data"
    with pytest.raises(UsageError, match=rf"can't fetch .*{FAULTS[fault][1]}") as raised:
        mnist.download(target, f"{mirror}{fault}/")
    assert str(raised.value).isprintable(), "one line, and no escape codes of the server"
    assert not target.exists()


def test_synthetic_digits_are_the_same_everywhere_and_differ_by_seed(project: Path) -> None:
    from demo.mnist import synthesize

    images, labels = synthesize(50, seed=1)
    assert images.shape == (50, 28, 28) and set(labels.tolist()) <= set(range(10))
    assert (images == synthesize(50, seed=1)[0]).all()
    assert (images != synthesize(50, seed=2)[0]).any()


SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "16", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("workers", "env"),
    [
        (7, {}),
        (3, SRUN | {"SLURM_CPUS_PER_TASK": "4"}),
        (3, SRUN | {"SLURM_CPUS_PER_TASK": "4", "LOCAL_WORLD_SIZE": "2"}),  # of an image's hook
        (0, SRUN),
        (1, TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}),
        (2, TORCHRUN | {"SLURM_CPUS_PER_TASK": "6", "LOCAL_WORLD_SIZE": "2"}),
        (0, TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}),
        (0, TORCHRUN | {"LOCAL_WORLD_SIZE": "16"}),
    ],
)
def test_workers_for_the_cpus_of_a_rank(
    project: Path, monkeypatch: pytest.MonkeyPatch, workers: int, env: dict[str, str]
) -> None:
    """On a machine of eight, or as many as Slurm gave."""
    from demo.engine.data.workers import loading_workers

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert loading_workers("auto")["num_workers"] == workers


def test_the_log_shows_how_long_steps_wait_for_data(project: Path, tmp_path: Path) -> None:
    line = "        chosen = torch.as_tensor(indices)\n"
    pause = "        __import__('time').sleep(0.2)\n"
    slow = edited(project, tmp_path, "data.py", line, pause + line)
    job = srun(slow, tmp_path / "run", 2, "--max-steps=8", "--log-every=2").wait()
    waits = re.findall(r"train/data_seconds (\S+)", job.log)
    assert len(waits) == 4 and all(float(seconds) >= 0.2 for seconds in waits), job.log


@pytest.mark.parametrize("late", [False, True])
def test_a_killed_loading_worker_is_named(project: Path, tmp_path: Path, late: bool) -> None:
    """Also if the rank learns of it late, after a batch has failed."""
    job = srun(project, tmp_path / "run", 2, "--workers=1", "--max-steps=1000", STEP_SECONDS="0.05")
    job.wait_for_step(3)
    (rank, _) = job.processes
    helpers = psutil.Process(rank.pid).children()
    ((server, worker),) = ((helper, child) for helper in helpers for child in helper.children())
    if late:
        server.suspend()
    worker.kill()
    if late:
        time.sleep(0.5)
        server.resume()
    assert job.wait().codes[0] == 1
    error = "error: a loading worker ended, perhaps because memory ran out (DataLoader worker (pid"
    assert error in job.log and "Traceback" not in job.log and "leaked" not in job.log
