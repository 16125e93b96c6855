"""What docs/large-data.md tells to do is done, on small files."""

import json
import pickle
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from metrics import reproducible
from pages import put_example
from renderer import TEMPLATE

from benchmarks import jpegs

from .conftest import Job, clean_environment, srun

SHARDS, EACH, EDGE = 4, 40, 36


@pytest.fixture(scope="module")
def images(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the example, and its images in all three layouts."""
    root = tmp_path_factory.mktemp("images") / "demo"
    shutil.copytree(project, root)
    put_example(root, "JPEG images in files or shards")
    jpegs.write(root / "data", SHARDS, EACH, EDGE)
    return root


@pytest.mark.parametrize("kind", ["files", "tar", "parquet"])
def test_images_of_each_layout_train_and_go_on_bit_for_bit(
    images: Path, tmp_path: Path, kind: str
) -> None:
    """Of Parquet, the size of each shard is known, by the program in the page."""
    sizes = images / "data/train/sizes.json"
    sizes.unlink(missing_ok=True)
    if kind == "parquet":
        page = (TEMPLATE / "docs/large-data.md").read_text("utf-8")
        (code,) = re.findall(r"^```python\n(import json\n.*?)^```$", page, re.M | re.S)
        subprocess.run([sys.executable, "-c", code], cwd=images, check=True)
        assert json.loads(sizes.read_text()) == {f"{n:04}.parquet": EACH for n in range(SHARDS)}
    flags = (f"--dataset={kind}", "--data-dir=data", "--size=32", "--channels=4", "--batch-size=5")
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
import sys
from pathlib import Path
from demo.data import Files, Shards

folder = Path(sys.argv[1])
for kind in ("files", "tar", "parquet"):
    samples = Files(folder, 36) if kind == "files" else Shards(folder, kind, 36, None)
    if kind != "files":
        samples.assign(0, 1, 0)
    print(sorted((label, int(image.sum())) for image, label in samples))
"""


def test_all_layouts_hold_the_same_samples(images: Path) -> None:
    command = [sys.executable, "-c", READ, str(images / "data/train")]
    env = clean_environment(images)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    files, tar, parquet = done.stdout.splitlines()
    assert files == tar == parquet and files.count("(") == SHARDS * EACH


def test_ten_billion_tokens_are_opened_at_once(tmp_path: Path) -> None:
    page = (TEMPLATE / "docs/large-data.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(class Tokens.*?)^```$", page, re.M | re.S)
    names = {"np": np, "torch": torch, "Sequence": Sequence, "Path": Path}
    names["Tensor"] = torch.Tensor
    names["Dataset"] = torch.utils.data.Dataset
    exec(code, names)
    path = tmp_path / "tokens"
    with path.open("wb") as file:
        np.arange(2**16, dtype=np.uint16).tofile(file)
        file.truncate(2 * 10**10)
    before = psutil.Process().memory_info().rss
    data = names["Tokens"](path, 1024)
    assert len(data) == (10**10 - 1) // 1024
    tokens, following = data.collate(data.__getitems__([0, 3, len(data) - 1]))
    assert tokens.shape == following.shape == (3, 1024) and tokens.dtype == torch.int64
    assert tokens[1].tolist() == list(range(3 * 1024, 4 * 1024))
    assert following[1].tolist() == list(range(3 * 1024 + 1, 4 * 1024 + 1))
    assert not tokens[2].any()
    assert psutil.Process().memory_info().rss - before < 2**26
    assert len(pickle.dumps(names["Tokens"](path, 1024).__dict__)) < 1000
