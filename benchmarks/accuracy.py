"""Seconds until the test accuracy on MNIST is 99.0 %: in the loop, and for the whole command."""

import json
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from .compare import Comparison, in_turns
from .ranks import Setting, environment, figures, project

RECIPE = "recipe of pytorch/examples"
ENOUGH = 0.99
SHARE = 1 / 40  # target: this share of the other recipe's time
MOST = 9  # target for the whole command, in seconds
# Phases of a training, each with a text of the log line at its end. The last one ends with the
# command.
PHASES = {
    "start": ", device ",
    "training": "epoch 1 ",
    "test": "test: ",
    "figures and end": "",
}


def measure(setting: Setting, repeats: int) -> list[Comparison]:
    """Compare the default recipe with the recipe of pytorch/examples; each turn has a new seed."""
    if not setting.data_dir:
        raise SystemExit("accuracy needs MNIST itself: name its folder with --data-dir")
    gpu = setting.device == "cuda"
    our_seeds, their_seeds = count(), count()
    notes: list[str] = []
    whole: dict[str, list[float]] = {"this project": [], RECIPE: []}
    loop = Comparison(
        title="Time to 99.0 % test accuracy",
        unit="s",
        baseline=RECIPE,
        figures=in_turns(
            {
                "this project": lambda: ours(setting, next(our_seeds), whole, notes),
                RECIPE: lambda: theirs(setting, next(their_seeds), whole, notes),
            },
            repeats,
        ),
        target="under two seconds" if gpu else f"{1 / SHARE:.0f} times as fast",
        limit=None if gpu else SHARE,
        notes=notes,
    )
    command = Comparison(
        title="Time of the whole command, to 99.0 %",
        unit="s",
        baseline=RECIPE,
        figures=whole,
        target="" if gpu else f"at most {MOST} s",
    )
    if gpu:
        loop.met = loop.medians["this project"] < 2
    else:
        loop.met = loop.ratios["this project"] <= SHARE
        command.met = command.medians["this project"] <= MOST
    return [loop, command]


def ours(setting: Setting, seed: int, whole: dict[str, list[float]], notes: list[str]) -> float:
    """Return the default recipe's seconds of training; infinite if it is not accurate enough."""
    run_dir, phases = watched(setting, f"--seed={seed}", "--trackers=tensorboard")
    whole["this project"].append(sum(phases.values()))
    summary = json.loads((run_dir / "summary.json").read_text())
    split = ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items())
    notes.append(
        f"This project, seed {seed}: {summary['test_accuracy']:.2%} after one epoch. "
        f"Seconds of the command: {split}."
    )
    if summary["test_accuracy"] < ENOUGH:
        return float("inf")
    return summary["trained_seconds"]


def watched(setting: Setting, *flags: str) -> tuple[Path, dict[str, float]]:
    """Train as `make train` does; return the run folder and the seconds of each phase."""
    run_dir = Path(tempfile.mkdtemp(dir=project().parent)) / "run"
    ranks = ("--standalone", f"--nproc-per-node={setting.ranks}", "-m", "demo")
    command = [
        sys.executable,
        "-m",
        "demo.tools.torchrun",
        *ranks,
        "train",
        f"--run-dir={run_dir}",
    ]
    phases: dict[str, float] = {}
    ends = iter(PHASES.items())
    name, end = next(ends)
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, *setting.flags, *flags],
        cwd=project(),
        env=environment(setting),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if end and end in line:
                now = time.perf_counter()
                phases[name], began = now - began, now
                name, end = next(ends)
    phases[name] = time.perf_counter() - began
    if process.returncode or end:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode} while: {name}")
    return run_dir, phases


def theirs(setting: Setting, seed: int, whole: dict[str, list[float]], notes: list[str]) -> float:
    """Return the seconds of training of the recipe of pytorch/examples."""
    began = time.perf_counter()
    found = figures(setting, "reference_recipe", seed=seed)
    whole[RECIPE].append(time.perf_counter() - began)
    notes.append(f"Theirs, seed {seed}: {found['accuracy']:.2%} after {found['epochs']} epochs.")
    return found["figure"] if found["accuracy"] >= ENOUGH else float("inf")
