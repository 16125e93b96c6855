"""Each setting of the trainer does what its help text says."""

import fcntl
import json
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from .conftest import QUICK, Launch, clean_environment, edited, python, srun

# The part of a World that provenance reads.
WORLD = {
    "device": torch.device("cpu"),
    "backend": None,
    "hostnames": ["n1"],
    "size": 1,
    "launcher": "none",
}

# A network without batch statistics: then it must not matter how a step's samples are shared out.
LINEAR_MODEL = """
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .learner import Learner


class Model(Learner):
    def build(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

    def optimizers(self, network: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(network.parameters(), lr=self.settings.lr)

    def loss(self, network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        return F.cross_entropy(network(images), labels)
"""


@pytest.fixture(scope="module")
def linear_project(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project with a network of its owner's in model.py."""
    folder = tmp_path_factory.mktemp("linear") / "demo"
    shutil.copytree(project, folder)
    (folder / "src" / "demo" / "model.py").write_text(LINEAR_MODEL)
    # The pictures of the example need what only its own model measures.
    (folder / "src" / "demo" / "figures.py").write_text("def draw(*_: object) -> dict: return {}\n")
    return folder


def outcome(project: Path, run_dir: Path, ranks: int, *flags: str) -> tuple[float, float]:
    """Return test loss and last training loss."""
    job = srun(project, run_dir, ranks, "--log-every=1", *flags).wait()
    losses = [line["train/loss"] for line in job.metrics() if "train/loss" in line]
    return job.summary["test_loss"], losses[-1]


def test_a_step_is_the_same_however_its_samples_are_shared_out(
    linear_project: Path, tmp_path: Path
) -> None:
    """120 samples in a step: at once, with accumulation, and on several ranks with accumulation."""
    ways = {
        "whole": (1, "--batch-size=120"),
        "accumulated": (1, "--batch-size=30", "--accumulate=4"),
        "both": (3, "--global-batch-size=120", "--accumulate=2"),
    }
    outcomes = [
        outcome(linear_project, tmp_path / name, ranks, "--max-steps=10", "--lr=0.01", *flags)
        for name, (ranks, *flags) in ways.items()
    ]
    for losses in outcomes[1:]:
        assert losses == pytest.approx(outcomes[0], rel=1e-4)


def test_ranks_with_fewer_samples_count_for_less(linear_project: Path, tmp_path: Path) -> None:
    """One step over all 15,000 samples, in shards of 1,000: uneven on two ranks, even on one."""
    outcomes = [
        outcome(
            linear_project,
            tmp_path / f"on-{ranks}",
            ranks,
            *("--streaming", "--batch-size=20000", "--warmup=0", "--lr=0.01", "--epochs=2"),
        )
        for ranks in (1, 2)
    ]
    assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-4)


def test_bf16_computes_in_bf16(launch: Launch) -> None:
    flags = ("--lr=0.02", "--log-every=1")
    full = launch(2, *flags, name="fp32").summary
    mixed = launch(2, *flags, "--precision=bf16", name="bf16").summary
    assert mixed["parameters_sha256"] != full["parameters_sha256"]
    assert mixed["test_loss"] == pytest.approx(full["test_loss"], rel=0.05)


def test_deterministic_refuses_an_operation_that_is_not(project: Path, tmp_path: Path) -> None:
    """CPUs have one of those that GPUs have many of."""
    old = "        images, labels = batch\n        return"
    put = "torch.zeros(2).put_(labels[:2] % 2, images[:2, 0, 0, 0])"
    mine = edited(project, tmp_path, "model.py", old, old.replace("return", f"{put}; return"))
    assert srun(mine, tmp_path / "free", 1).wait().codes == [0]
    job = srun(mine, tmp_path / "run", 1, "--deterministic").wait()
    assert job.codes == [1]
    assert "deterministic implementation" in job.log


def test_clipping_bounds_the_step(launch: Launch) -> None:
    flags = ("--max-steps=1", "--log-every=1", "--momentum=0", "--weight-decay=0", "--warmup=0")
    free = launch(2, *flags, "--clip-norm=1e9", name="free")
    tight = launch(2, *flags, "--clip-norm=1e-9", name="tight")
    still = launch(2, *flags, "--lr=1e-30", name="still")
    norms = [job.metrics()[0]["train/gradient_norm"] for job in (free, tight)]
    assert norms[0] == norms[1] > 0.1, "the norm that is logged is that before clipping"
    # Without a step to speak of, only batch statistics differ from the start, in both alike.
    assert tight.summary["test_loss"] == pytest.approx(still.summary["test_loss"], rel=1e-6)
    assert free.summary["test_loss"] != pytest.approx(still.summary["test_loss"], rel=1e-3)


def test_the_learning_rate_of_each_step_is_logged(launch: Launch) -> None:
    job = launch(
        2,
        *("--max-steps=10", "--log-every=1", "--warmup=0.5", "--schedule=linear"),
        *("--lr-scaling=sqrt", "--lr-reference-batch=32"),
    )
    rates = [line["train/lr"] for line in job.metrics() if "train/lr" in line]
    # 128 samples a step are four times the reference: twice 0.15 at the peak, in the middle.
    shares = [0.04, 0.232, 0.424, 0.616, 0.808, 1, 0.8, 0.6, 0.4, 0.2]
    assert rates == pytest.approx([0.3 * share for share in shares])


@pytest.mark.slow
def test_compile_compiles(project: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    job = srun(
        project,
        tmp_path / "run",
        1,
        "--compile",
        "--compile-mode=reduce-overhead",
        "--max-steps=3",
        TORCHINDUCTOR_CACHE_DIR=str(cache),
    ).wait()
    assert job.summary["global_step"] == 3
    assert list(cache.rglob("*.cpp")), "torch.compile wrote no kernel"
    # Names in checkpoints are the network's own.
    state = torch.load(tmp_path / "run" / "checkpoints" / "step-00000003.pt", weights_only=True)
    assert all(name.startswith("layers.") for name in state["networks"]["network"])


MODE = """
import sys
from types import SimpleNamespace
import torch
from demo.engine.ranks.strategy import distribute
torch.compile = lambda network, mode: print(mode) or network  # CPUs compile alike in all modes
values = {"strategy": "ddp", "shard_within": "world", "offload": False, "compile": True}
settings = SimpleNamespace(**values, compile_mode=sys.argv[1])
world = SimpleNamespace(size=1, device=torch.device("cpu"))
distribute(torch.nn.Linear(1, 1), lambda network: (), settings, world)
"""


def test_torch_is_told_what_to_aim_at(project: Path) -> None:
    assert python(project, MODE, "reduce-overhead") == "reduce-overhead\n"


def test_rank_0_logs_plain_lines_or_all_do(launch: Launch) -> None:
    quiet = launch(2, "--max-steps=20", "--log-every=10", name="quiet")
    assert "[rank 0]" in quiet.log and "[rank 1]" not in quiet.log
    assert "\r" not in quiet.log and "\x1b" not in quiet.log
    assert "step 10  " in quiet.log and "samples_per_second" in quiet.log
    loud = launch(2, "--max-steps=2", "--log-all-ranks", name="loud")
    assert "[rank 1] settings from" in loud.log


def test_a_terminal_has_a_progress_bar(project: Path, tmp_path: Path) -> None:
    main, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    flags = [*QUICK, f"--run-dir={tmp_path / 'run'}", "--max-steps=20"]
    process = subprocess.Popen(
        [sys.executable, "-m", "demo", "train", *flags],
        cwd=project,
        env=clean_environment(project),
        stdout=end,
        stderr=end,
    )
    os.close(end)
    shown = b""
    while True:
        try:
            shown += os.read(main, 4096)
        except OSError:  # the other end is closed
            break
    os.close(main)
    assert process.wait() == 0
    assert b"epoch 1:" in shown and b"/20 [" in shown and b"step/s" in shown


def test_the_backend_of_a_notebook_is_not_used(project: Path, tmp_path: Path) -> None:
    """A job that a notebook submits has its MPLBACKEND, but perhaps not that package."""
    old = "    images, labels = batch\n"
    pyplot = f"    from matplotlib import pyplot\n\n    pyplot.close(pyplot.figure())\n{old}"
    mine = edited(project, tmp_path, "figures.py", old, pyplot)
    # Not a fork of a process that has imported matplotlib.
    command = [sys.executable, "-m", "demo", "train", *QUICK, "--max-steps=1"]
    env = {**clean_environment(mine), "MPLBACKEND": "module://nowhere"}
    subprocess.run([*command, f"--run-dir={tmp_path / 'run'}"], cwd=mine, env=env, check=True)
    assert list(tmp_path.glob("run/figures/*.png"))


def test_provenance_says_where_the_run_came_from(
    project: Path, launch: Launch, tmp_path: Path
) -> None:
    launch(2, "--max-steps=1", SLURM_JOB_ID="42", SECRET_TOKEN="hush")
    text = (tmp_path / "run" / "provenance.json").read_text()
    provenance = json.loads(text)
    assert provenance["template"]["package_name"] == "demo"
    assert provenance["template"]["_commit"]
    assert provenance["packages"]["torch"] and provenance["slurm"]["SLURM_JOB_ID"] == "42"
    assert provenance["world_size"] == 2 and "git" in provenance
    assert provenance["backend"] == "gloo" and provenance["gpu"] == {}
    assert "hush" not in text


def test_provenance_holds_changes_that_were_not_committed(
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from demo.engine.run import provenance

    def git(*words: str, text: str | None = None) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(["git", *names, *words], text=True, input=text)

    def facts() -> dict[str, Any]:
        world = SimpleNamespace(**WORLD)
        return provenance.collect(world)["git"]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_TOKEN", "hush-hush")
    assert facts() == {"commit": None, "changes": None, "diff": ""}
    git("init", "--quiet")
    code, new = tmp_path / "src/code.py", tmp_path / "src/new.py"
    code.parent.mkdir()
    code.write_text("a = 1\n\n")
    git("add", ".")
    git("commit", "--quiet", "--message=first")
    assert facts() == {"commit": git("rev-parse", "HEAD").strip(), "changes": "", "diff": ""}
    code.write_bytes(b"a = 2 # \xe4\n\n")
    new.write_text("b = 3\n")
    index = (tmp_path / ".git/index").read_bytes()
    found = facts()
    assert found["changes"].splitlines() == [" M src/code.py", "?? src/new.py"]
    assert (tmp_path / ".git/index").read_bytes() == index
    git("stash", "--quiet", "--include-untracked")
    git("apply", text=found["diff"])
    assert code.read_text() == "a = 2 # \N{REPLACEMENT CHARACTER}\n\n"
    assert new.read_text() == "b = 3\n"

    secrets = ("hush-hush", "0123456789abcdef0123", "hunter2")
    code.write_text(
        "a = 'hush-hush'\napi_key = '0123456789abcdef0123'\nurl = 'https://me:hunter2@host/'\n"
        "key = encoder.layers_of_attention[12]\n"
        "environ['KEY'] = '0123456789abcdef0123'\nuse('A_TOKEN', '0123456789abcdef0123')\n"
        "api_key: str = '0123456789abcdef0123'\nhead = 'Bearer 0123456789abcdef0123'\n"
    )
    diff = facts()["diff"]
    assert not [each for each in secrets if each in diff]
    assert diff.count("<secret>") == 5
    assert "+a = '<MY_TOKEN>'\n+api_key = '<secret>'\n" in diff
    assert "+key = encoder.layers_of_attention[12]\n" in diff
    monkeypatch.setattr(provenance, "LONGEST_DIFF", 20)
    assert facts()["diff"] == f"{diff[:20]}\n... and {len(diff) - 21} characters more\n"
    assert not caplog.messages
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    assert facts()["commit"] is None
    (message,) = caplog.messages
    assert "no commit: run 'git rev-parse HEAD'" in message


def test_provenance_is_found_whatever_surrounds_it(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from demo.engine.errors import UsageError
    from demo.engine.run import provenance

    world = SimpleNamespace(**WORLD)
    monkeypatch.chdir(tmp_path)
    answers = tmp_path / ".copier-answers.yml"
    answers.write_text("_src_path: https://me:hunter2@host/x\nsince: 2026-01-30\n")
    # What pip leaves of a package that it could not remove.
    (tmp_path / "half-1.0.dist-info").mkdir()
    (tmp_path / "psutil-0.1.dist-info").mkdir()
    (tmp_path / "psutil-0.1.dist-info/METADATA").write_text("Name: psutil\nVersion: 0.1\n")
    import importlib_metadata  # its own finder, which a tracker's packages may install, raises

    importlib_metadata.version("torch")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "--api-key", "0123456789abcdef0123"])
    found = provenance.collect(world)
    assert found["template"] == {"_src_path": "https://<login>@host/x", "since": "2026-01-30"}
    assert found["command"] == ["train", "--api-key", "<secret>"]
    assert "torch" in found["packages"]
    assert found["packages"]["psutil"] == "0.1", "the first on sys.path is imported"

    answers.write_text("<<<<<<< before\n_commit: a\n=======\n_commit: b\n>>>>>>> after\n")
    with pytest.raises(UsageError, match=r"answers\.yml is not YAML") as raised:
        provenance.collect(world)
    assert "\n" not in str(raised.value)


def test_the_diff_of_a_minified_file_takes_no_minutes(project: Path) -> None:
    from demo.engine.run.provenance import hidden

    text = ",".join(['"token":"a"'] * 100_000)
    began = time.monotonic()
    assert hidden(text) == text
    assert time.monotonic() - began < 20
