"""The instructions of docs/large-data.md work, on small files."""

import signal
from pathlib import Path

import numpy as np
import pytest
from metrics import reproducible
from renderer import render_project

from benchmarks import jpegs

from .conftest import Job, command, python, srun

SHARDS, EACH, EDGE = 4, 40, 36


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the example, and images in all three layouts."""
    root = render_project(tmp_path_factory.mktemp("images") / "demo", example="images")
    jpegs.write(root / "data", SHARDS, EACH, EDGE)
    return root


def run(images: Path, *words: str) -> str:
    """Return the output of a command of the project, which must succeed."""
    done = command(images, *words)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("kind", [pytest.param("files", marks=pytest.mark.slow), "tar", "parquet"])
def test_images_of_each_layout_train_and_go_on_bit_for_bit(
    images: Path, tmp_path: Path, kind: str
) -> None:
    """For Parquet, `make data` has counted the images. For tar, a setting has their number."""
    (images / "data/parquet-sizes.json").unlink(missing_ok=True)
    if kind == "parquet":
        assert f"{SHARDS * EACH} images in {SHARDS} shards" in run(
            images, "download", "--dataset=parquet"
        )
    flags = (f"--dataset={kind}", "--size=32", "--layers", "1", "--width=4", "--batch-size=5")
    flags += ("--epochs=3", "--max-steps=100", "--log-every=1")
    flags += ("--workers=auto",) if kind == "files" else ("--workers=2",)
    if kind == "tar":
        flags += ("--samples=160",)

    def start(name: str) -> Job:
        return srun(images, tmp_path / name, 2, *flags, SLURM_CPUS_PER_TASK="3")

    whole = start("whole").wait()
    assert whole.summary["global_step"] == 3 * 16
    assert "2 loading worker(s) a rank" in whole.log
    job = start("run")
    job.wait_for_step(20)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.wait().codes == [75, 75], job.log
    resumed = start("run").wait()
    assert resumed.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert reproducible(resumed.metrics()) == reproducible(whole.metrics())


READ = """
import hashlib
import sys
from glob import glob
from pathlib import Path
from demo.data import subfolders
from demo.files import SHARDS, Files

folder = sys.argv[1]
found = [Files(Path(folder), subfolders(Path(folder)))]
for name, kind in SHARDS.items():
    paths = sorted(glob(f"{folder}/*.{name}"))
    found += [kind(paths), [sample for path in paths for sample in kind.read(path)]]
for samples in found:
    in_turn = [samples[index] for index in range(len(samples))]
    again = [samples[index] for index in reversed(range(len(samples)))]
    assert in_turn == again[::-1]
    print(sorted((label, hashlib.md5(content).hexdigest()) for _, content, label in in_turn))
"""


def test_all_layouts_hold_the_same_samples_by_index_and_in_turn(images: Path) -> None:
    lines = python(images, READ, images / "data/train").splitlines()
    assert len(lines) == 5 and len(set(lines)) == 1 and lines[0].count("(") == SHARDS * EACH


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that starts with the GPT."""
    return render_project(tmp_path_factory.mktemp("tokens") / "demo", example="text")


OPEN = """
import os, pickle, sys
from pathlib import Path
import numpy as np, psutil, torch
from demo.data import MappedWindows

path = Path(sys.argv[1])
before = psutil.Process().memory_info().rss
data = MappedWindows(path, 1024, 50_000)
assert len(data) == (10**10 - 1) // 1024
tokens, following = data.collate(data.__getitems__([0, 3, len(data) - 1]))
assert tokens.shape == following.shape == (3, 1024) and tokens.dtype == torch.int64
assert tokens[1].tolist() == list(range(3 * 1024, 4 * 1024))
assert following[1].tolist() == list(range(3 * 1024 + 1, 4 * 1024 + 1))
assert not tokens[2].any()
assert psutil.Process().memory_info().rss - before < 2**26
os.truncate(path, 200_000)  # nothing for a copy in memory to fill it with
data = MappedWindows(path, 1024, 50_000)
copied = pickle.dumps(data)
assert len(copied) < 1000 and len(pickle.loads(copied)) == len(data) == 97
"""


def test_ten_billion_tokens_are_opened_at_once(tokens: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    with path.open("wb") as file:
        np.arange(50_000, dtype=np.uint16).tofile(file)
        file.truncate(2 * 10**10)
    python(tokens, OPEN, path)


def test_tokens_train_and_go_on_bit_for_bit(tokens: Path, tmp_path: Path) -> None:
    """With loading workers, which map the files again."""
    (tokens / "data").mkdir(exist_ok=True)
    for part, count in (("train", 100_000), ("validation", 2_000)):
        counted = np.arange(count, dtype=np.uint16) % 300
        counted.tofile(tokens / f"data/{part}.bin")
    assert "data/train.bin has 100000 tokens" in run(tokens, "download", "--dataset=tokens")
    flags = ("--dataset=tokens", "--vocabulary=300", "--layers=1", "--width=16", "--heads=2")
    flags += ("--max-steps=40", "--log-every=1", "--batch-size=8", "--workers=1", "--lr=0.01")
    whole = srun(tokens, tmp_path / "whole", 2, *flags).wait()
    job = srun(tokens, tmp_path / "run", 2, *flags)
    job.wait_for_step(10)
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.wait().codes == [75, 75], job.log
    resumed = srun(tokens, tmp_path / "run", 2, *flags).wait()
    assert resumed.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert resumed.summary["test_perplexity"] < 300
    too_few = srun(tokens, tmp_path / "few", 1, *flags, "--vocabulary=299").wait()
    assert too_few.codes == [1] and "Traceback" not in too_few.log, too_few.log
    assert "token 299, but vocabulary" in too_few.log
