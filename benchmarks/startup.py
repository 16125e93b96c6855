"""Seconds from the command to the first step, and to the answer of --help."""

import subprocess
import sys
import time

from .compare import Comparison, in_turns
from .ranks import Setting, environment, lines, peer, project, train


def measure(setting: Setting, repeats: int) -> list[Comparison]:
    """Compare the start with what every training must do, and --help with importing torch."""
    first = Comparison(
        title="From the command to the first step",
        unit="s",
        baseline="import torch, join the ranks",
        figures=in_turns(
            {
                "this project": lambda: first_step(setting, "--trackers=none"),
                "this project, with TensorBoard": lambda: first_step(
                    setting, "--trackers=tensorboard"
                ),
                "import torch, join the ranks": lambda: peer(setting, "joining", began=time.time()),
            },
            repeats,
        ),
        target="at most 1.25 times",
        notes=["The step is of synthetic digits; torchrun's own start is in all three."],
    )
    first.met = first.ratios["this project"] <= 1.25
    answer = Comparison(
        title="Until `train --help` has answered",
        unit="s",
        baseline="import torch",
        figures=in_turns(
            {
                "this project": lambda: run(setting, "-m", "demo", "train", "--help"),
                "import torch": lambda: run(setting, "-c", "import torch"),
            },
            repeats,
        ),
        target="less than 0.3 of importing torch",
    )
    answer.met = answer.ratios["this project"] < 0.3
    return [first, answer]


def first_step(setting: Setting, *flags: str) -> float:
    """Return the seconds from the command until rank 0 has logged the first step."""
    began = time.time()
    run_dir = train(setting, "--max-steps=1", "--log-every=1", "--dataset=synthetic", *flags)
    return next(line["time"] for line in lines(run_dir) if "train/loss" in line) - began


def run(setting: Setting, *arguments: str) -> float:
    """Return the seconds that a command of Python takes."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        cwd=project(),
        env=environment(setting),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - began
