"""What `load` of data.py may return: several validation sets, weights, sets that wrap others."""

import json
import pickle
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pages
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

from .conftest import PACED, QUICK, command, edited, own_project, python, srun

DATA = """
from types import SimpleNamespace

import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split

from .engine import UsageError


class Rows(Dataset):
    def __init__(self, length, seed):
        draw = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(length, 4, generator=draw)
        self.targets = self.inputs.sum(1)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Batches(Rows):
    def __getitems__(self, indices):
        return self.inputs[indices], self.targets[indices]

    @staticmethod
    def collate(batch):
        return batch


def load(settings):
    of = Batches if "batches" in settings.dataset else Rows
    train = of(200, 1)
    train = {
        "split": lambda: random_split(train, [0.2, 0.8], torch.Generator().manual_seed(3))[0],
        "both": lambda: ConcatDataset([Subset(train, range(20)), Subset(train, range(100, 120))]),
        "list": lambda: [train[number] for number in range(40)],
        "all": lambda: train,
    }[settings.dataset.partition("-")[0]]()
    sets = {"near": of(50, 2), "far": of(31, 3)}
    sets["far"].targets = sets["far"].targets + 10
    if settings.validation_size == 1:
        sets = sets["far"]
    return SimpleNamespace(train=train, validation=sets, test=Subset(of(50, 4), range(7)))


def new_data(path, settings):
    raise UsageError("no such data")
"""
MODEL = """
import torch
from torch import nn

from .learner import Learner


class Model(Learner):
    best = ("validation/far/loss", "min")

    def __init__(self, settings):
        super().__init__(settings)
        if settings.validation_size == 1:
            self.best = ("validation/loss", "min")

    def build(self):
        return nn.Linear(4, 1)

    def optimizers(self, network):
        return torch.optim.SGD(network.parameters(), lr=0.1)

    def loss(self, network, batch):
        inputs, targets = batch
        return (network(inputs)[:, 0] - targets).square().mean()
"""
FLAGS = ("--device=cpu", "--trackers=none", "--epochs=2", "--batch-size=5", "--validation-size=9")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a small table as its data."""
    return own_project(tmp_path_factory.mktemp("rows"), DATA, MODEL, ["evaluate", "predict"])


@pytest.mark.parametrize("dataset", ["split", "both", "list"])
def test_sets_that_wrap_others_train(rows: Path, tmp_path: Path, dataset: str) -> None:
    found = []
    for kind in ("rows", "batches"):
        flags = (*FLAGS, f"--dataset={dataset}-{kind}", "--workers=2" if kind == "rows" else "")
        job = srun(rows, tmp_path / kind, 2, *filter(None, flags)).wait()
        assert job.summary["global_step"] == 8, "40 samples, two epochs, 10 in a step"
        assert "40 training samples" in job.log and "4 steps an epoch" in job.log
        found.append(job.summary["test_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_several_validation_sets_have_metrics_of_their_own(rows: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--dataset=all")
    job = srun(rows, tmp_path / "several", 2, *flags).wait()
    alone = srun(rows, tmp_path / "alone", 2, *flags[:-2], "--validation-size=1", flags[-1]).wait()
    lines, one = (
        [line for line in each.metrics() if any("validation" in name for name in line)]
        for each in (job, alone)
    )
    for line, other in zip(lines, one, strict=True):
        assert line["validation/far/loss"] == other["validation/loss"]
        assert line["validation/near/loss"] < line["validation/far/loss"]
    assert job.summary["validation_far_loss"] == alone.summary["validation_loss"]

    run = str(job.run_dir)
    done = command(rows, "evaluate", run, "--split=validation", "--checkpoint=latest")
    assert done.returncode == 0, done.stderr
    kept = json.loads((job.run_dir / "evaluation-validation-00000030.json").read_text())
    last = {name: value for name, value in lines[-1].items() if "validation" in name}
    assert kept["metrics"] == pytest.approx(last, rel=1e-5)
    done = command(rows, "predict", run, "--split=validation/far")
    assert done.returncode == 0, done.stderr
    assert len((job.run_dir / "predictions-validation-far.jsonl").read_text().splitlines()) == 31
    for words in (["--split=validation"], ["--split=validation/no"], ["--split=no"]):
        done = command(rows, "predict", run, *words)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert "validation/near" in done.stderr and "validation/far" in done.stderr
    for path, text in ((tmp_path, "no such data"), (tmp_path / "none", "does not exist")):
        done = command(rows, "predict", run, f"--input={path}")
        assert done.returncode == 1 and text in done.stderr and "Traceback" not in done.stderr


def test_digits_of_ones_own_are_predicted(project: Path, tmp_path: Path) -> None:
    from demo.mnist import synthesize

    run = tmp_path / "run"
    assert srun(project, run, 1, *QUICK, "--max-steps=60").wait().codes == [0]
    assert command(project, "predict", run).returncode == 0
    images, _ = synthesize(1_001, seed=2)
    (tmp_path / "new").mkdir()
    for number in range(3):
        Image.fromarray(images[number].numpy()).save(tmp_path / "new" / f"{number}.png")
    done = command(project, "predict", run, f"--input={tmp_path / 'new'}")
    assert done.returncode == 0, done.stderr
    old, new = (
        [json.loads(line) for line in (run / f"predictions-{name}.jsonl").read_text().splitlines()]
        for name in ("test", "new")
    )
    assert [each["name"] for each in new] == ["0.png", "1.png", "2.png"]
    assert [each["prediction"]["digit"] for each in new] == [each["digit"] for each in old[:3]]


def test_a_change_by_a_hook_is_warned_about_once(rows: Path, tmp_path: Path) -> None:
    """Also if it sets an attribute that the set did not have, and on several ranks."""
    old = "    def loss("
    hook = "    def on_step(self, training):\n        training.datasets.train.level = 0.5 * "
    hook += f"training.position.step\n        training.datasets.train.cache = None\n\n{old}"
    mine = edited(rows, tmp_path, "model.py", old, hook)
    said = srun(mine, tmp_path / "run", 2, *FLAGS, "--dataset=all").wait().log
    assert len(re.findall("set_progress", said)) == 1 and "on_step" in said and "`level`" in said


def test_a_read_of_a_stream_that_waits_for_progress_is_refused(project: Path) -> None:
    from demo.engine import ShardStream, UsageError

    class Curriculum:
        def set_progress(self, *place: float) -> None: ...

        def read(self, shard: int) -> Iterator[int]:
            return iter(range(shard))

    with pytest.raises(UsageError, match="decode"):
        ShardStream([1, 2], Curriculum().read)
    assert ShardStream([1, 2], Curriculum().read, decode=float)


@pytest.fixture
def page(project: Path, tmp_path: Path) -> Path:
    """A copy of the project, for the code of docs/data.md."""
    root = tmp_path / "demo"
    shutil.copytree(project, root)
    return root


TRAIN = "train=train.as_stream() if settings.streaming else train"


@pytest.mark.slow  # test_stateful.py has the quick ones
def test_the_curriculum_of_the_page_goes_on_exactly(page: Path, tmp_path: Path) -> None:
    recipe = pages.recipe(page, "Data that change during the training", "data")
    recipe.put_data("    train = Digits(", "    train = Curriculum(")
    whole = srun(page, tmp_path / "whole", 2, "--workers=0").wait()
    first = srun(page, tmp_path / "run", 2, "--workers=2", "--log-every=1", **PACED)
    first.stop(5)
    again = srun(page, tmp_path / "run", 2, "--workers=2").wait()
    assert again.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    plain = (page / "src/demo/data.py").read_text().replace("0.5 * progress", "0.0 * progress")
    (page / "src/demo/data.py").write_text(plain)
    other = srun(page, tmp_path / "other", 2, "--workers=0").wait()
    assert other.summary["parameters_sha256"] != whole.summary["parameters_sha256"]


def test_the_classes_of_the_page_are_balanced(page: Path, tmp_path: Path) -> None:
    recipe = pages.recipe(page, "Balance the classes", "data")
    chosen = "torch.cat([(labels == 3).nonzero()[:40, 0], (labels != 3).nonzero()[:, 0]])"
    few = f"    chosen = {chosen}\n    train = Balanced(images[chosen], labels[chosen])\n"
    recipe.put_data("    train = Digits(images[:-held_out], labels[:-held_out])\n", few)
    model = page / "src/demo/model.py"
    code = "from .engine import record\n\ndef train_step(self, updater):\n"
    code += "    for each in updater.batches:\n"
    code += "        record('threes', (each.batch[1] == 3).float().mean())\n"
    code += "    super().train_step(updater)\n"
    model.write_text(pages.with_code(model.read_text(), code))
    line = srun(page, tmp_path / "run", 2, "--max-steps=30", "--log-every=30").wait().metrics()[0]
    assert line["train/threes"] == pytest.approx(0.1, abs=0.03)  # 0.0024 without weights


def test_the_validation_sets_of_the_page(page: Path, tmp_path: Path) -> None:
    recipe = pages.recipe(page, "Several validation sets", "data")
    old = "validation=Digits(images[-held_out:], labels[-held_out:])"
    recipe.put_data(old, f"validation=with_noise({old.partition('=')[2]})")
    model = page / "src/demo/model.py"
    best = model.read_text().replace('"validation/accuracy"', '"validation/noisy/accuracy"')
    model.write_text(best)
    job = srun(page, tmp_path / "run", 2).wait()
    assert job.summary["validation_noisy_accuracy"] > 0.1
    assert {"validation/clean/loss", "validation/noisy/loss"} < set().union(*job.metrics())


def test_data_on_the_gpu_give_the_same_run(page: Path, tmp_path: Path) -> None:
    """Here, their device is the CPU; tests/gpu trains with them on GPUs."""
    plain = srun(page, tmp_path / "plain", 2).wait().summary
    pages.recipe(page, "Keep the data on the GPU", "data").put_data("= Digits(", "= Resident(")
    resident = srun(page, tmp_path / "resident", 2).wait().summary
    assert resident["parameters_sha256"] == plain["parameters_sha256"]
    assert resident["test_accuracy"] == plain["test_accuracy"]


class Traced(Tensor):
    """A tensor on the CPU that lists what copies it, instead of a copy to a GPU."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, given: Any, options: Any = None) -> Any:  # noqa: ANN401
        if function.__name__ not in ("pin_memory", "to"):
            return super().__torch_function__(function, _, given, options or {})
        waits = "" if not options or options["non_blocking"] else " and wait"
        cls.calls.append(function.__name__ + waits)
        return given[0]


@pytest.mark.parametrize(
    ("device", "calls"),
    [("cuda", ["pin_memory", "to"]), ("xpu", ["to"]), ("cpu", ["to and wait"])],
)
def test_python_waits_for_copies_to_the_cpu_only(
    project: Path, device: str, calls: list[str]
) -> None:
    from demo.engine import to_device

    Traced.calls.clear()
    to_device({"images": torch.ones(2).as_subclass(Traced)}, torch.device(device))
    assert Traced.calls == calls


HUGE = """
def has_huge_pages(tensor: Tensor) -> bool:
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *words = line.split()
        if "-" in first:
            begin, end = (int(each, 16) for each in first.split("-"))
            found = begin <= tensor.data_ptr() < end
        elif found and first == "VmFlags:":
            return "hg" in words
    return False


def load("""


def test_large_batches_are_in_huge_pages(project: Path, tmp_path: Path) -> None:
    root = edited(project, tmp_path, "data.py", "def load(", HUGE.strip())
    data = root / "src/demo/data.py"
    probe = "    assert has_huge_pages(torch.ones(2**20))\n    return Datasets("
    data.write_text(data.read_text().replace("    return Datasets(", probe))
    new = {"PYTHONUNBUFFERED": "1"}  # torch reads the variable once, so this needs a new process
    assert srun(root, tmp_path / "run", 1, "--max-steps=1", **new).wait().codes == [0]


@pytest.mark.parametrize(("workers", "pins"), [(0, False), (1, True)])
def test_only_loading_workers_have_a_thread_that_pins(
    project: Path, workers: int, pins: bool
) -> None:
    """Without workers, a data set may return batches that are on the GPU, and can't be pinned."""
    from demo.engine.data.steps import StepLoader

    settings: Any = SimpleNamespace(batch_size=2, accumulate=1, seed=0, workers=workers)
    world: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cuda"))
    loader = StepLoader(TensorDataset(torch.ones(4)), settings, world, None)
    assert loader.loader.pin_memory is pins


def test_a_fraction_of_the_data(page: Path, tmp_path: Path) -> None:
    recipe = pages.recipe(page, "A fraction of the data", "data")
    recipe.put_data(TRAIN, "train=part_of(train, len(train), settings.fraction)")
    job = srun(page, tmp_path / "run", 2, "--fraction=0.1", "--dry-run").wait()
    assert job.codes == [0, 0] and "synthetic: 1500 training samples" in job.log, job.log


def test_folds_are_each_held_out_once(page: Path, tmp_path: Path) -> None:
    recipe = pages.recipe(page, "Cross-validation", "data")
    old = "    held_out = settings.validation_size\n"
    call = "        return fold_of(Digits(images, labels), len(labels), settings)\n"
    recipe.put_data(old, f"    if settings.folds:\n{call}{old}")
    code = "from demo.data import load; from demo.settings import Settings; import sys\n"
    code += "d = [load(Settings(dataset='synthetic', folds=5, seed=n)) for n in range(5)]\n"
    code += "held = [i for each in d for i in each.validation.indices]\n"
    code += "assert sorted(held) == list(range(20_000))\n"
    code += "assert all(not {*x.train.indices} & {*x.test.indices} for x in d)"
    python(page, code)
    job = srun(page, tmp_path / "run", 1, "--folds=5", "--seed=4", "--dry-run").wait()
    assert job.codes == [0] and "16000 training samples" in job.log, job.log


def test_hdf5_is_opened_in_each_worker(page: Path, tmp_path: Path) -> None:
    import h5py  # type: ignore[import-untyped]

    with h5py.File(tmp_path / "digits.h5", "w") as file:
        file["images"] = torch.randint(0, 255, (640, 28, 28), dtype=torch.uint8).numpy()
        file["labels"] = (torch.arange(640) % 10).numpy()
    recipe = pages.recipe(page, "HDF5, LMDB and zarr", "data")
    recipe.put_data(TRAIN, f"train=Hdf5({str(tmp_path / 'digits.h5')!r})")
    runs = [
        srun(page, tmp_path / workers, 2, f"--workers={workers}", "--max-steps=8").wait()
        for workers in ("0", "2")
    ]
    first, second = (each.summary["parameters_sha256"] for each in runs)
    assert first == second


def test_lmdb_and_zarr_are_opened_as_the_page_says(project: Path, tmp_path: Path) -> None:
    import lmdb
    import zarr

    with lmdb.open(str(tmp_path / "lmdb")) as made, made.begin(write=True) as writing:
        writing.put(b"7", b"seven")
    text = pages.section(project / "docs/data.md", "HDF5, LMDB and zarr")
    (opening,) = re.findall(r"`(lmdb\.open.*?)`", text)
    names = {"lmdb": lmdb, "path": str(tmp_path / "lmdb")}
    assert eval(opening, names).get(b"%d" % 7) == b"seven"
    zarr.save_array(str(tmp_path / "zarr"), torch.arange(6).numpy())
    (opening,) = re.findall(r"`(zarr\.open_array.*?)`", text)
    opened = eval(opening, {"zarr": zarr, "path": str(tmp_path / "zarr")})
    assert pickle.loads(pickle.dumps(opened))[4] == 4


@pytest.mark.slow  # test_stateful.py has the quick ones
def test_the_replay_buffer_of_the_page_goes_on_exactly(page: Path, tmp_path: Path) -> None:
    recipe = pages.recipe(page, "A data set with a state", "data")
    recipe.put_data(TRAIN, "train=Replay()")
    model = page / "src/demo/model.py"
    code = "from .engine import Training\n\ndef on_step(self, training: Training) -> None:\n"
    code += "    step, rank = training.position.step, training.world.rank\n"
    code += "    training.datasets.train.push(torch.full((2, 4), step + rank / 10))\n\n"
    code += "def train_step(self, updater):\n    updater.update(self.own)\n\n"
    code += "def own(self, network, batch):\n"
    code += "    images = batch.mean() + torch.zeros(4, 1, 28, 28)\n"
    code += "    return network(images).square().mean()\n"
    model.write_text(pages.with_code(model.read_text(), code))
    whole = srun(page, tmp_path / "whole", 2, "--workers=2").wait()
    first = srun(page, tmp_path / "run", 2, "--log-every=1", **PACED)
    first.stop(5)
    again = srun(page, tmp_path / "run", 2).wait()
    assert again.summary["parameters_sha256"] == whole.summary["parameters_sha256"]


def drawn(weights: Any, ranks: int, epochs: int) -> list[list[int]]:  # noqa: ANN401
    """Return the indices of each epoch in the order in which all ranks together use them."""
    from demo.engine.data.batches import EpochSampler, weights_of
    from demo.engine.position import Place

    dataset = TensorDataset(torch.arange(len(weights)))
    dataset.weights = weights  # type: ignore[attr-defined]
    found = []
    for epoch in range(epochs):
        samplers = [
            EpochSampler(len(dataset), 12 // ranks, rank, ranks, 5) for rank in range(ranks)
        ]
        for sampler in samplers:
            sampler.weights = weights_of(dataset)
            sampler.place = lambda batch, epoch=epoch: Place(epoch, batch, 0.0)
        steps = zip(*samplers, strict=True)
        found.append([index for step in steps for batch in step for _, _, index in batch])
    return found


def test_weights_decide_how_often_a_sample_is_drawn(project: Path) -> None:
    labels = torch.tensor([0] * 900 + [1] * 90 + [2] * 9 + [3])
    weights = 1 / torch.bincount(labels)[labels]
    weights[0] = 0
    epochs = drawn(weights, 1, 5)
    assert drawn(weights, 3, 5) == epochs, "the same on any number of ranks"
    indices = [index for epoch in epochs for index in epoch]
    assert len(indices) == 5 * 996 and epochs[0] != epochs[1] and 0 not in indices
    shares = Counter(labels[indices].tolist())
    for label in range(4):  # 4 standard deviations: 0.025
        assert shares[label] / len(indices) == pytest.approx(0.25, abs=0.025)


def test_weights_of_parts_count_in_what_wraps_them(project: Path) -> None:
    from demo.engine.data.batches import weights_of
    from demo.engine.errors import UsageError

    weighted, plain = TensorDataset(torch.arange(4)), TensorDataset(torch.arange(2))
    weighted.weights = [1, 2, 3, 4]  # type: ignore[attr-defined]
    whole = ConcatDataset([Subset(weighted, [3, 1]), weighted])
    assert weights_of(whole).tolist() == [4, 2, 1, 2, 3, 4]  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="ConcatDataset"):
        weights_of(ConcatDataset([weighted, plain]))
    assert weights_of(plain) is None and weights_of(random_split(plain, [1, 1])[0]) is None
    for bad in ([1, 2, 3], [1, 2, 3, -1], [0, 0, 0, 0], [1, 2, 3, float("nan")]):
        weighted.weights = bad  # type: ignore[attr-defined]
        with pytest.raises(UsageError, match="weights"):
            weights_of(weighted)


def test_a_sample_that_is_drawn_twice_draws_other_numbers(project: Path) -> None:
    from demo.engine.data.batches import SeededSamples
    from demo.engine.position import Place

    class Noise(TensorDataset):
        def __getitem__(self, index: int) -> Any:  # noqa: ANN401
            return torch.rand(()).item()

    place = Place(0, 0, 0.0)
    samples = SeededSamples(Noise(torch.arange(4)), 7)
    first, second = samples.__getitems__([(place, 10, 3), (place, 11, 3)])
    assert first != second == samples.__getitems__([(place, 11, 3)])[0]
