"""A mistake gives one clear line and a non-zero exit code, and leaves no incomplete file."""

import io
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import (
    QUICK,
    Launch,
    clean_environment,
    command,
    edited,
    sign,
    spawn,
    srun,
    tasks,
    torchrun,
)


@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (2, ["--device=cuda"], "sees no GPU"),
        (1, ["--device=mps"], "device is mps"),
        (2, ["--backend=nccl"], "backend nccl does not"),
        (2, ["--world-size=3"], r"world_size is 3, but the launcher (srun) gave 2 rank(s)"),
        (2, ["--dataset=mnist", "--data-dir=nowhere"], "no train-images-idx3-ubyte[.gz] in"),
        (2, ["--global-batch-size=33"], "multiple of 2, such as 32"),
        (2, ["--batch-size=100000"], "one batch of 100000 on each"),
        (1, ["--validation-size=20000"], "hold out at least"),
        (2, ["--trackers", "tensorbord"], "has tensorboard"),
        (2, ["--run-dir=/proc/nothing"], "run folder /proc/nothing"),
        (2, ["--config=nowhere.yaml"], "nowhere.yaml: No such file"),
        (1, ["--experiment=a/b"], "experiment is 'a/b'"),
        (1, ["--experiment=.."], "experiment is '..'"),
        (1, ["--register-model=a/b"], "register_model is 'a/b'"),
    ],
)
def test_mistakes(
    launch: Launch, tmp_path: Path, ranks: int, flags: list[str], message: str
) -> None:
    """Two ranks show that each way to find a mistake ends all of them, with the same message."""
    job = launch(ranks, *flags)
    assert set(job.codes) == {1}, job.log
    errors = [line for line in job.log.splitlines() if line.startswith("error: ")]
    assert errors and all(message in line for line in errors), job.log
    assert "Traceback" not in job.log
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--epoch=3"], 2, "Unrecognized options: --epoch"),
        (["--init-from=nowhere"], 1, "error: init_from is nowhere"),
        (["--dataset=mine"], 1, "ValueError: mine"),
    ],
)
def test_what_all_ranks_fail_for_is_said_once(
    project: Path, tmp_path: Path, flags: list[str], code: int, message: str
) -> None:
    """Rank 0 prints the error, and the launcher ends the others."""
    old = '    if settings.dataset == "mnist":\n'
    new = f'    if settings.dataset == "mine":\n        raise ValueError("mine")\n{old}'
    mine = edited(project, tmp_path, "data.py", old, new)
    job = torchrun(mine, tmp_path / "run", 1, 2, *flags).wait()
    assert job.codes == [code], job.log
    assert job.log.count(message) == 1, job.log


def test_a_taken_port_is_said(launch: Launch, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        # Alone of its world, so that it is the one that opens the port.
        env = {"MASTER_PORT": str(other.getsockname()[1]), "SLURM_STEP_NUM_TASKS": "2"}
        job = launch(1, "--timeout=5", **env)
    assert job.codes == [1]
    assert "check MASTER_ADDR" in job.log
    assert "Traceback" not in job.log


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        ({"SLURM_NODEID": "1"}, "127.0.0.1:.* timed out after 3000ms"),
        ({"MASTER_ADDR": "n9.invalid"}, "n9.invalid:.* (not known|Temporary failure)"),
    ],
)
def test_ranks_that_cant_reach_the_first_node_fail(
    launch: Launch, tmp_path: Path, env: dict[str, str], reason: str
) -> None:
    failed = tmp_path / "failed"
    job = launch(1, "--meet-timeout=3", SLURM_STEP_NUM_TASKS="2", FAILURE_FILE=str(failed), **env)
    assert job.codes == [1]
    (line,) = [line for line in job.log.splitlines() if line.startswith("error: ")]
    assert "can't meet" in line and re.search(reason, line)
    assert "Traceback" not in job.log
    # Without the file, the job would be requeued, and end there again.
    assert failed.read_text().startswith("error: rank ")


def test_ranks_with_different_settings_are_refused(project: Path, tmp_path: Path) -> None:
    train = ["demo", "train", f"--run-dir={tmp_path}/run", *QUICK]
    job = spawn(project, tmp_path / "run", [train, [*train, "--lr=0.2"]], tasks(2)).wait()
    assert set(job.codes) <= {1, 76} and job.codes[1] == 1, job.log
    (error,) = [line for line in job.log.splitlines() if "has lr" in line]
    assert error.startswith("error: rank 1 has lr 0.2, but rank 0 has 0.15")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (
            "images, labels = images[rank:], labels[rank:]",
            "training set has 14999 samples on rank 1, but 15000 on another",
        ),
        (
            "test.images, test.labels = test.images[rank:], test.labels[rank:]",
            "test set has 1000 samples on rank 1, but 1001 on another",
        ),
        ("test.images, test.labels = test.images[:0], test.labels[:0]", "no samples"),
    ],
)
def test_a_set_that_is_empty_or_of_another_length_on_one_rank(
    project: Path, tmp_path: Path, cut: str, message: str
) -> None:
    """For example, data.py already splits the set. The error comes before the first step."""
    held_out = "    held_out = settings.validation_size\n"
    rank = "    rank = int(__import__('os').environ['SLURM_PROCID'])\n"
    mine = edited(project, tmp_path, "data.py", held_out, f"{rank}    {cut}\n{held_out}")
    job = srun(mine, tmp_path / "run", 2).wait()
    assert job.codes == [1, 1], job.log
    assert message in job.log
    assert "Traceback" not in job.log
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_optimizer(project: Path, launch: Launch, tmp_path: Path) -> None:
    launch(1, "--max-steps=2")
    lion = "type('Lion', (torch.optim.SGD,), {})("
    mine = edited(project, tmp_path, "model.py", "torch.optim.SGD(", lion)
    job = srun(mine, tmp_path / "run", 1, "--max-steps=4").wait()
    assert job.codes == [1], job.log
    assert "model.py makes Lion" in job.log
    assert "Traceback" not in job.log


@pytest.mark.parametrize(
    ("words", "message"),
    [(["trian"], "unknown command 'trian'; did you mean 'train'?"), ([], "usage:")],
)
def test_an_unknown_command(project: Path, words: list[str], message: str) -> None:
    done = command(project, *words)
    assert done.returncode == 1 and message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_an_env_that_cannot_be_read_or_understood(project: Path, tmp_path: Path) -> None:
    def runs(env_file: bytes) -> subprocess.CompletedProcess[str]:
        (tmp_path / ".env").write_bytes(env_file)
        words = [sys.executable, "-m", "demo", "runs"]
        env = clean_environment(project)
        return subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)

    done = runs(b"GOOD=1\nWANDB_API_KEY correct-horse\n")
    assert "line 2" in done.stderr and "correct-horse" not in done.stderr
    done = runs(b"NAME=\xff\n")
    assert done.returncode == 1
    assert done.stderr.startswith("error: can't read .env: ") and done.stderr.count("\n") == 1


# From the third step on, the loss is not a number.
DIVERGES = """

class Model(Model):
    losses = 0

    def loss(self, network, batch):
        self.losses += 1
        loss = super().loss(network, batch)
        if self.losses == LAST:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss
"""


@pytest.mark.parametrize(
    "every, last", [("--checkpoint-every=2", 3), ("--checkpoint-every=500", 30)]
)
def test_a_network_that_diverged_is_not_saved(
    project: Path, tmp_path: Path, every: str, last: int
) -> None:
    """Neither between two looks at the loss, nor at the end, where all looked well."""
    diverging = tmp_path / "demo"
    shutil.copytree(project, diverging)
    with (diverging / "src/demo/model.py").open("a") as file:
        file.write(DIVERGES.replace("LAST", str(last)))
    job = srun(diverging, tmp_path / "run", 2, *QUICK, every).wait()
    assert job.codes == [1, 1], job.log
    assert "parameters is nan" in job.log
    assert "Traceback" not in job.log
    kept = [path.name for path in job.run_dir.glob("checkpoints/step-*.pt")]
    assert kept == (["step-00000002.pt"] if every == "--checkpoint-every=2" else [])
    state = json.loads((job.run_dir / "status.json").read_text())
    assert state["status"] == "failed" and "norm" in state["error"]
    assert not (job.run_dir / "summary.json").exists()


def test_a_checkpoint_that_does_not_fit(launch: Launch, tmp_path: Path) -> None:
    """Of another network, without a value, and with values of other types."""
    import torch

    launch(1, "--max-steps=1")
    path = tmp_path / "run" / "checkpoints" / "step-00000001.pt"
    content = path.read_bytes()
    gone = object()
    for keys, value, *said in (
        (("networks", "network", "layers.5.weight"), gone, "fit model.py", "layers.5.weight"),
        (("meter", "recorded"), gone, "KeyError: 'recorded'"),
        (("position", "step"), "5", "(ValueError: step is '5'"),
        (("position", "step"), float("nan"), "(ValueError: step is nan"),
        (("position", "consumed"), -64, "(ValueError: consumed is -64"),
        (("position", "best_score"), float("nan"), "(ValueError: best_score is nan"),
        (("meter", "trained"), ("a", 1, 1.0), "(ValueError: invalid literal for int()"),
        (("meter", "recorded"), [{"train/x": ("sum", "a", 1)}], "(ValueError: could not convert"),
        (("line_count",), "x", "(TypeError: line_count is a str"),
    ):
        state = place = torch.load(io.BytesIO(content), weights_only=True)
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        if value is gone:
            del place[keys[-1]]
        torch.save(state, path)
        sign(path, path)
        job = launch(1, *QUICK)
        assert job.codes == [1] and all(each in job.log for each in said), job.log
        assert "Traceback" not in job.log


def test_a_damaged_checkpoint_is_not_used(project: Path, launch: Launch, tmp_path: Path) -> None:
    """torch.load takes changed bytes for what they are now."""
    launch(1, "--max-steps=1")
    run = tmp_path / "run"
    path = run / "checkpoints" / (run / "checkpoints/best").read_text()
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(each ^ 0xFF for each in content[middle : middle + 64])
    path.write_bytes(content)
    commands = [[name, run] for name in ("evaluate", "predict", "export")]
    commands.append(["train", f"--run-dir={tmp_path}/other", *QUICK, f"--init-from={run}"])
    for words in commands:
        done = command(project, *words)
        assert done.returncode == 1 and f"{path} is damaged (" in done.stderr, done.stderr
        assert "Traceback" not in done.stderr


def test_what_a_file_says_is_no_command_to_the_terminal(launch: Launch, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    path = folder / "step-00000001.pt"
    path.touch()
    zeros = "0" * 64
    lines = f"{zeros}  {path.name}\n{zeros}  a\x1b]0;owned\x07\n"
    path.with_suffix(".sha256").write_text(lines)
    job = launch(1, "--max-steps=1")
    assert "corrupt checkpoint" in job.log
    for text in (job.log, (tmp_path / "run/log.txt").read_text()):
        assert "\x1b" not in text and "\x07" not in text


def test_a_log_that_is_a_link_is_refused(launch: Launch, tmp_path: Path) -> None:
    """A run folder in a shared root has a name that can be guessed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("mine\n")
    (tmp_path / "run/log.txt").symlink_to(tmp_path / "mine")
    job = launch(1, "--max-steps=1")
    assert job.codes == [1] and "can't write to" in job.log
    assert (tmp_path / "mine").read_text() == "mine\n"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (r"raise ValueError('mine \x1b[2J\n\nof two lines')", r"ValueError: mine \x1b[2J"),
        ("raise SystemExit('mine\\nof two lines')", "mine"),
        ("import mine_alone", "error: module mine_alone is missing ("),
        ("print('mine'); raise SystemExit(3)", ""),
        ("print('mine'); exit()", "RuntimeError: exit() was called"),
    ],
)
def test_the_batch_script_hears_of_a_failure(
    project: Path, tmp_path: Path, how: str, told: str
) -> None:
    copy = edited(project, tmp_path / "copy", "data.py", "def load(", f"{how}\n\n\ndef load(")
    env = {"FAILURE_FILE": str(tmp_path / "failed")}
    job = srun(copy, tmp_path / "run", 1, **env).wait()
    assert job.codes in ([1], [3]) and "mine" in job.log
    (line,) = (tmp_path / "failed").read_text().splitlines()
    assert line.startswith(told) and bool(line) == bool(told) and line in job.log
    assert "\x1b" not in job.log + line


def test_files_that_are_nested_too_deeply(project: Path, tmp_path: Path) -> None:
    from demo.engine.errors import UsageError
    from demo.engine.foreign import read_lines
    from demo.settings import Settings
    from demo.tools.survey import read_settings
    from demo.trackers.dispatch import known_ids

    brackets = "[" * 50_000
    for name in ("config.yaml", "provenance.json", "trackers.json", "metrics.jsonl"):
        (tmp_path / name).write_text(brackets)
    assert read_settings(tmp_path) == known_ids(tmp_path) == {}
    with pytest.raises(UsageError, match="maximum recursion depth"):
        Settings.from_yaml(tmp_path / "config.yaml")
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{brackets}\n{{"step": 2}}\n')
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2]
