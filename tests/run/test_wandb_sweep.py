"""A sweep of Weights & Biases: its real agent, real ranks, and a stand-in for its server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from renderer import render_project

from .conftest import PATIENCE, clean_environment, command, free_port
from .wandb_server import Server, config

TRAIN = ("--dataset=synthetic", "--validation-size=500", "--device=cpu", "--checkpoint-every=10")
# A rank notes how it was started, and trains.
RANK = """
import json, os, runpy, signal, sys
from pathlib import Path
run, rank = os.environ["WANDB_RUN_ID"], os.environ.get("RANK", "0")
Path(os.environ["NOTES"], f"{run}-{rank}").write_text(json.dumps(sys.argv[1:]))
if (run, rank) == ("t1", "1"):
    os.kill(os.getpid(), signal.SIGKILL)
sys.modules["__main__"].__file__ = "demo"
runpy.run_module("demo", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a sweep of W&B, which borrows the environment of the tests."""
    folder = render_project(
        tmp_path_factory.mktemp("swept") / "demo", setup="full", sweep="wandb", trackers=[]
    )
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


class Sweep:
    """A sweep's process in its folder, against a server.

    Args:
        launch: the launch command; one rank, where it is left out.
        flags: of train.
    """

    def __init__(
        self, project: Path, folder: Path, server: Server, *flags: str, launch: list[str] = ()
    ) -> None:
        self.folder, self.server = folder, server
        launch = launch or [sys.executable, "-m", "demo", "train"]
        launch = ["env", "WANDB_MODE=offline", *launch]
        own = ["ada/net/x1", f"--run-root={folder}", *TRAIN, *flags]
        env = {**clean_environment(project), **server.environment, "NOTES": str(folder)}
        # Where the agent leaves its files.
        env["WANDB_DIR"] = str(folder)
        with (folder / "log").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "demo", "sweep", *own, "--", *launch],
                cwd=project,
                env=env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self) -> int:
        """Return the exit code."""
        return self.process.wait(PATIENCE)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Return once a condition holds."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def saved(self, trial: str) -> list[Path]:
        """Return the checkpoints of a trial."""
        return list(self.run_dir(trial).glob("checkpoints/*.pt"))

    def summary(self, trial: str) -> dict[str, Any]:
        """Return the summary of a trial."""
        return json.loads((self.run_dir(trial) / "summary.json").read_text())

    def run_dir(self, trial: str) -> Path:
        """Return the run folder of a trial."""
        return self.folder / "x1" / trial

    @property
    def log(self) -> str:
        """The output of the sweep, the agent and the trials."""
        return (self.folder / "log").read_text()


def test_all_ranks_get_a_trials_settings_and_a_crash_is_survived(
    swept: Path, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "demo.tools.torchrun", "--nnodes=1", "--nproc-per-node=2"]
    torchrun += ["--master-port", free_port(), str(tmp_path / "rank.py"), "train"]
    trials = [{"lr": 0.1, "batch_size": 16, "compile": False}, {"lr": 0.3}, {"lr": 0.2}]
    with Server(trials, config(swept)) as server:
        sweep = Sweep(swept, tmp_path, server, "--max-steps=20", launch=torchrun)
        assert sweep.wait() == 0, sweep.log
    assert server.started == ["t0", "t1", "t2"]
    assert "of which 1 failed" in sweep.log
    for trial in ("t0", "t2"):
        first, second = ((tmp_path / f"{trial}-{rank}").read_text() for rank in (0, 1))
        assert first == second
        settings = yaml.safe_load((sweep.run_dir(trial) / "config.yaml").read_text())
        assert settings.items() >= trials[int(trial[1])].items()
        assert f"--lr={settings['lr']}" in json.loads(first)
        assert sweep.summary(trial)["world_size"] == 2
        # W&B's own run has the id that the server gave the trial.
        assert list(sweep.run_dir(trial).glob(f"wandb/offline-run-*-{trial}")), sweep.log
    assert "--no-compile" in json.loads((tmp_path / "t0-0").read_text())
    assert not (sweep.run_dir("t1") / "summary.json").exists()


@pytest.mark.slow
def test_a_trial_that_the_server_stops_saves_and_the_next_starts(
    swept: Path, tmp_path: Path
) -> None:
    with Server([{"epochs": 2000}, {"max_steps": 5}], config(swept)) as server:
        sweep = Sweep(swept, tmp_path, server, "--trackers=none")
        sweep.wait_for(lambda: sweep.saved("t0"))
        server.stopping.add("t0")
        assert sweep.wait() == 0, sweep.log
    assert "stopped the trial t0" in sweep.log
    assert not (sweep.run_dir("t0") / "summary.json").exists()
    assert sweep.summary("t1")["global_step"] == 5
    assert "of which 0 failed" in sweep.log


@pytest.mark.parametrize("whom", ["the sweep", "the ranks"])
@pytest.mark.slow
def test_a_stopped_sweep_goes_on_with_the_trial_that_the_server_names(
    swept: Path, tmp_path: Path, whom: str
) -> None:
    flags = ("--max-steps=150", "--trackers=none")
    with Server([{"seed": 3}, {"seed": 4}], config(swept)) as server:
        sweep = Sweep(swept, tmp_path, server, *flags)
        sweep.wait_for(lambda: sweep.saved("t0"))
        if whom == "the sweep":
            sweep.process.send_signal(signal.SIGTERM)
        else:
            # As Slurm does it before the time limit.
            (rank,) = ranks(sweep.process.pid)
            os.kill(rank, signal.SIGUSR2)
        assert sweep.wait() == 75, sweep.log
        assert server.started == ["t0"], "another trial was started"
        assert not (sweep.run_dir("t0") / "summary.json").exists()
        server.waiting.clear()
        assert Sweep(swept, tmp_path, server, *flags).wait() == 0, sweep.log
    assert server.started == ["t0", "t0"]
    assert sweep.summary("t0")["resumed_from_step"]


def ranks(pid: int) -> list[int]:
    """Return the processes below one that train."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    below = [rank for child in children for rank in ranks(int(child))]
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return below or ([pid] if words[-2].startswith(b"--run-dir=") else [])


@pytest.mark.slow
def test_a_sweep_of_failures_fails(swept: Path, tmp_path: Path) -> None:
    with Server([{}] * 9, config(swept)) as server:
        sweep = Sweep(swept, tmp_path, server, launch=["bash", "-c", "exit 3"])
        assert sweep.wait() == 1, sweep.log
    assert server.started == ["t0", "t1", "t2"], "the agent gives up"
    assert "of which 3 failed" in sweep.log


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--", "srun"], "no sweep"),
        (["--epochs=2", "--", "srun"], "no sweep"),
        (["ada/net/x1"], "no launch command"),
        (["ada/net/x1", "--lr=-1", "--", "srun"], "lr is -1.0"),
    ],
)
def test_a_mistake_is_named_before_the_agent_starts(
    swept: Path, words: list[str], complaint: str
) -> None:
    done = command(swept, "sweep", *words)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith("error: ") and complaint in line


def test_the_sweep_is_as_wandb_reads_it(swept: Path) -> None:
    with Server([]) as server:
        subprocess.run(
            [sys.executable, "-m", "wandb", "sweep", "--project=net", "configs/sweep.yaml"],
            cwd=swept,
            env={**clean_environment(swept), **server.environment},
            check=True,
        )
        assert server.created == yaml.safe_load(config(swept))
    # The metric is one that the trials log, the settings are some that train has.
    assert server.created["metric"] == {"name": "validation/accuracy", "goal": "maximize"}
    known = yaml.safe_load((swept / "configs/train.yaml").read_text())
    assert set(server.created["parameters"]) <= known.keys()
