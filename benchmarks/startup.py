"""Seconds from the command to the first step, and to the answer of --help."""

import subprocess
import sys
import time
from functools import cache
from pathlib import Path

from .compare import Comparison, in_turns
from .ranks import Setting, copied, environment, lines, peer, project, train

MOST, MOST_OF_HELP = 1.1, 0.3  # targets: times what each training must do, times importing torch
ALL_TRACKERS = ("tensorboard", "wandb", "aim", "mlflow")


def measure(setting: Setting, repeats: int) -> list[Comparison]:
    """Compare the start with what each training must do, and --help with importing torch."""
    for trackers in (("tensorboard",), ALL_TRACKERS):
        first_step(setting, "--trackers=none", trackers=trackers)  # lets Python compile the modules
    figures = in_turns(
        {
            "this project": lambda: first_step(setting, "--trackers=none"),
            "figures not drawn": lambda: first_step(setting, "--trackers=none", folder=undrawn()),
            "with TensorBoard": lambda: first_step(setting, "--trackers=tensorboard"),
            "import torch, join": lambda: joined(setting),
            "import torch, join, make DDP and SGD": lambda: joined(setting, ddp="yes"),
        },
        repeats,
    )
    first = Comparison(
        title="Time from the command to the first step",
        unit="s",
        baseline="import torch, join, make DDP and SGD",
        figures=figures,
        target=f"at most {MOST} times",
        limit=MOST,
        notes=["torchrun's own start is in all of them."],
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
    unused.met = unused.ratios["rendered with all four"] <= 1.03  # within the noise
    answer.met = answer.ratios["this project"] < MOST_OF_HELP
    return [first, unused, answer]


def first_step(
    setting: Setting,
    *flags: str,
    trackers: tuple[str, ...] = ("tensorboard",),
    folder: Path | None = None,
) -> float:
    """Return the seconds from the command until rank 0 has logged the first step."""
    folder = folder or project(*trackers)
    began = time.time()
    run_dir = train(setting, "--max-steps=1", "--log-every=1", *flags, folder=folder)
    return next(line["time"] for line in lines(run_dir) if "train/loss" in line) - began


@cache
def undrawn() -> Path:
    """Return a project without figures, which would be drawn once before the first step."""
    folder = copied(project("tensorboard"))
    path = folder / "src" / "demo" / "figures.py"
    path.write_text("def draw(*_: object) -> dict[str, object]:\n    return {}\n", "utf-8")
    return folder


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
