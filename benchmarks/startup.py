"""Seconds from the command to the first step, and to the answer of --help."""

import subprocess
import sys
import time

from .compare import Comparison, in_turns
from .ranks import Setting, environment, lines, peer, project, train

MOST, MOST_OF_HELP = 1.25, 0.3  # targets: times what each training must do, times importing torch
ALL_TRACKERS = ("tensorboard", "wandb", "aim", "mlflow")


def measure(setting: Setting, repeats: int) -> list[Comparison]:
    """Compare the start with what each training must do, and --help with importing torch."""
    for trackers in (("tensorboard",), ALL_TRACKERS):
        first_step(setting, "--trackers=none", trackers=trackers)  # lets Python compile the modules
    figures = in_turns(
        {
            "this project": lambda: first_step(setting, "--trackers=none"),
            "with TensorBoard": lambda: first_step(setting, "--trackers=tensorboard"),
            "import torch, join the ranks": lambda: joined(setting),
            "joined, DDP and SGD made": lambda: joined(setting, ddp="yes"),
        },
        repeats,
    )
    first = Comparison(
        title="Time from the command to the first step",
        unit="s",
        baseline="import torch, join the ranks",
        figures=figures,
        target=f"at most {MOST} times",
        limit=MOST,
        notes=["torchrun's own start is in all of them."],
    )
    with_ddp = Comparison(
        title="Time from the command to the first step, compared with plain DDP",
        unit="s",
        baseline="import torch, join, make DDP and SGD",
        figures={
            "this project": figures["this project"],
            "import torch, join, make DDP and SGD": figures["joined, DDP and SGD made"],
        },
        target=f"at most {MOST} times",
        limit=MOST,
    )
    unused = Comparison(
        title="Start with trackers that the run does not use",
        unit="s",
        baseline="rendered with TensorBoard only",
        figures=in_turns(
            {
                "rendered with all four": lambda: first_step(
                    setting, "--trackers=none", trackers=ALL_TRACKERS
                ),
                "rendered with TensorBoard only": lambda: first_step(setting, "--trackers=none"),
            },
            repeats,
        ),
        target="as fast",
    )
    answer = Comparison(
        title="Time of `train --help`",
        unit="s",
        baseline="import torch",
        figures=in_turns(
            {
                "this project": lambda: run(setting, "-m", "demo", "train", "--help"),
                "import torch": lambda: run(setting, "-c", "import torch"),
            },
            repeats,
        ),
        target=f"less than {MOST_OF_HELP} of importing torch",
        limit=MOST_OF_HELP,
    )
    first.met = first.ratios["this project"] <= MOST
    with_ddp.met = with_ddp.ratios["this project"] <= MOST
    unused.met = unused.ratios["rendered with all four"] <= 1.03  # within the noise
    answer.met = answer.ratios["this project"] < MOST_OF_HELP
    return [first, with_ddp, unused, answer]


def first_step(
    setting: Setting, *flags: str, trackers: tuple[str, ...] = ("tensorboard",)
) -> float:
    """Return the seconds from the command until rank 0 has logged the first step."""
    folder = project(*trackers)
    began = time.time()
    run_dir = train(setting, "--max-steps=1", "--log-every=1", *flags, folder=folder)
    return next(line["time"] for line in lines(run_dir) if "train/loss" in line) - began


def joined(setting: Setting, ddp: str = "") -> float:
    """Return the seconds until all ranks have joined."""
    return peer(setting, "joining", began=time.time(), ddp=ddp)


def run(setting: Setting, *arguments: str) -> float:
    """Return the seconds of a Python command."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        cwd=project(),
        env=environment(setting),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - began
