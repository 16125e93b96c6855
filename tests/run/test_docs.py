"""The commands of README.md and of a project's docs/examples.md work."""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from metrics import reproducible
from pages import EXAMPLES, put_example, put_hook, section, with_code
from renderer import TEMPLATE, copy_template

from .conftest import PATIENCE, Job, clean_environment, python, srun

# A Python whose environments borrow the tests' packages, pip among them, to save the downloads.
PYTHON = """#!/bin/bash
[[ "$1 $2" == "-m venv" ]] || exec {python} "$@"
{python} -m venv --without-pip "$3" && ln -s {scripts}/copier "$3/bin/" &&
    printf '%s\\n' {packages} >"$(echo "$3"/lib/python3*/site-packages)/borrowed.pth"
"""


def make_digits(folder: Path) -> Path:
    """Write few digits in MNIST's format into a new folder, and return it."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for part, count in (("train", 5_640), ("t10k", 50)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            head = np.array([0x800 + len(shape), *shape], ">u4").tobytes()
            values = draw.integers(0, 10, shape, np.uint8).tobytes()
            (folder / f"{part}-{kind}-ubyte").write_bytes(head + values)
    return folder


@pytest.mark.shows(
    "make demo",
    "cd copier-slurm-ddp",
    "make train",
)
def test_the_demo(tmp_path: Path) -> None:
    """`make demo`, on few digits."""
    root = copy_template(tmp_path / "template")
    shutil.copy(TEMPLATE / "Makefile", root)
    shutil.copytree(TEMPLATE / "scripts", root / "scripts")
    digits = make_digits(tmp_path / "digits")
    interpreter = tmp_path / "python3"
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    scripts = sysconfig.get_path("scripts")
    facts = {"python": sys.executable, "packages": " ".join(packages), "scripts": scripts}
    interpreter.write_text(PYTHON.format(**facts))
    interpreter.chmod(0o755)
    # The flags of a make that runs the tests would go before these variables.
    env = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    done = subprocess.run(
        ["make", "demo"],
        cwd=root,
        env={**env, "PYTHON3": str(interpreter), "MNIST_DIR": str(digits)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"Test accuracy: .*ranks: 2", done.stdout)
    assert (root / ".demo/project/README.md").is_file()


def put(project: Path, root: Path, title: str) -> Path:
    """Return a copy of a project with the files of an example of the page."""
    shutil.copytree(project, root)
    return put_example(root, title)


ALWAYS, *OTHERS = EXAMPLES


@pytest.fixture(
    scope="module",
    params=[ALWAYS, *(pytest.param(title, marks=pytest.mark.slow) for title in OTHERS)],
)
def example(
    request: pytest.FixtureRequest, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Sequence[str]]:
    """A project with the files of an example, and flags."""
    flags = ("--log-every=1", "--validate-every=30", *EXAMPLES[request.param])
    return put(project, tmp_path_factory.mktemp("example") / "demo", request.param), flags


@pytest.fixture(scope="module")
def whole(
    example: tuple[Path, Sequence[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Job]:
    """Return a function that runs it once without a stop, on a number of ranks."""
    root, flags = example
    folder = tmp_path_factory.mktemp("whole")
    return functools.cache(lambda ranks: srun(root, folder / str(ranks), ranks, *flags).wait())


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_an_example_is_stopped_and_goes_on_bit_for_bit(
    example: tuple[Path, Sequence[str]], whole: Callable[[int], Job], tmp_path: Path, ranks: int
) -> None:
    root, flags = example
    job = srun(root, tmp_path / "run", ranks, *flags)
    job.wait_for_step(5)
    job.processes[-1].send_signal(signal.SIGTERM)
    assert job.wait().codes == [75] * ranks, job.log
    resumed = srun(root, tmp_path / "run", ranks, *flags).wait()
    expected = whole(ranks).summary
    assert 5 <= resumed.summary["resumed_from_step"] < expected["global_step"]
    assert resumed.summary["parameters_sha256"] == expected["parameters_sha256"]
    assert reproducible(resumed.metrics()) == reproducible(whole(ranks).metrics())
    assert "figures.py failed" not in resumed.log


USE = """
import sys
from demo import data
from demo.model import Model
from demo.tools import export, predict

source, output, *rest = sys.argv[1:]
trained = Model.load(source)
trained.predict(trained.example(data.load(trained.settings).test, 2))
for number in "12":
    predict.main([source, "--output", f"{output}/{number}.jsonl"])
export.main([source, "--output", f"{output}/network.pt2", *rest])
"""


@pytest.mark.shows("python -m demo predict *", "python -m demo export *")
def test_an_example_predicts_and_is_exported(
    example: tuple[Path, Sequence[str]], whole: Callable[[int], Job], tmp_path: Path
) -> None:
    root, _ = example
    network = ["--network=generator"] * (
        "discriminator" in (root / "src/demo/model.py").read_text()
    )
    python(root, USE, whole(3).run_dir, tmp_path, *network)
    lines = (tmp_path / "1.jsonl").read_text()
    assert len(lines.splitlines()) in (2_001, 501, 201)
    assert (tmp_path / "2.jsonl").read_text() == lines
    assert (tmp_path / "network.pt2").is_file()


@pytest.mark.shows("make lint test")
@pytest.mark.parametrize(
    "command", [["pytest", "-q", "tests/test_yours.py"], ["ruff", "check", "."]]
)
def test_its_own_tests_and_linters_pass(
    example: tuple[Path, Sequence[str]], command: list[str]
) -> None:
    root, _ = example
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=root,
        env=clean_environment(root),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_hook_of_the_guide_logs_a_picture(project: Path, tmp_path: Path) -> None:
    """For digits; tests/run/test_examples.py has the other examples."""
    root = put_hook(shutil.copytree(project, tmp_path / "demo"))
    job = srun(root, tmp_path / "run", 2, "--max-steps=4", "--validate-every=2").wait()
    drawn = {path.name for path in (job.run_dir / "figures").glob("*-first-*.png")}
    names = ("validation-first-00000002", "validation-first-00000004")
    assert drawn == {f"{name}.png" for name in (*names, "test-first-00000004")}, job.log


def test_a_metric_and_learning_rates_of_the_guides(project: Path, tmp_path: Path) -> None:
    root = shutil.copytree(project, tmp_path / "demo")
    model = root / "src/demo/model.py"
    for page, title in (("metrics", "Add a metric"), ("optimizers", "Set learning rates")):
        text = section(root / f"docs/{page}.md", title)
        (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        model.write_text(with_code(model.read_text(), block))
    figures = root / "src/demo/figures.py"  # as the page says: `measure` returns no confusion now
    figures.write_text(re.sub(r".*sums\[.*\n", "", figures.read_text()))
    job = srun(root, tmp_path / "run", 2, "--max-steps=4", "--log-every=1").wait()
    assert job.codes == [0, 0], job.log
    lines = job.metrics()
    (measured,) = (line for line in lines if "validation/loss" in line)
    assert {name for name in measured if name.startswith("validation/")} == {
        "validation/loss",
        "validation/accuracy",
    }
    rates = [{v for k, v in line.items() if k.startswith("train/lr")} for line in lines]
    assert all(max(each) == pytest.approx(10 * min(each)) for each in rates if each)
    assert any(rates)


def test_the_smallest_model_trains(project: Path, tmp_path: Path) -> None:
    root = put(project, tmp_path / "demo", "The smallest model")
    summary = srun(root, tmp_path / "run", 1, "--lr=0.01").wait().summary
    assert 0 < summary["test_loss"] < 1.5
    assert summary["best_step"] == 30
