"""Seconds of training until 99.0 % of MNIST's test set are right."""

import json
from itertools import count

from .compare import Comparison, in_turns
from .ranks import Setting, figures, train

ENOUGH = 0.99
SHARE = 1 / 25  # of the other recipe's time


def measure(setting: Setting, repeats: int) -> list[Comparison]:
    """Compare the default recipe with that of pytorch/examples, each turn with another seed."""
    if not setting.data_dir:
        raise SystemExit("accuracy needs MNIST itself: name its folder with --data-dir")
    gpu = setting.device == "cuda"
    our_seeds, their_seeds = count(), count()
    notes: list[str] = []
    comparison = Comparison(
        title="Time to 99.0 % test accuracy",
        unit="s",
        baseline="recipe of pytorch/examples",
        figures=in_turns(
            {
                "this project": lambda: ours(setting, next(our_seeds), notes),
                "recipe of pytorch/examples": lambda: theirs(setting, next(their_seeds), notes),
            },
            repeats,
        ),
        target="under two seconds" if gpu else "25 times as fast",
        limit=None if gpu else SHARE,
        notes=notes,
    )
    if gpu:
        comparison.met = comparison.medians["this project"] < 2
    else:
        comparison.met = comparison.ratios["this project"] <= SHARE
    return [comparison]


def ours(setting: Setting, seed: int, notes: list[str]) -> float:
    """Return the default recipe's seconds of training; infinite if it is not accurate enough."""
    run_dir = train(setting, f"--seed={seed}", "--trackers=tensorboard")
    summary = json.loads((run_dir / "summary.json").read_text())
    notes.append(f"This project, seed {seed}: {summary['test_accuracy']:.2%} after one epoch.")
    if summary["test_accuracy"] < ENOUGH:
        return float("inf")
    return summary["trained_seconds"]


def theirs(setting: Setting, seed: int, notes: list[str]) -> float:
    """Return the seconds of training of the recipe of pytorch/examples."""
    found = figures(setting, "reference_recipe", seed=seed)
    notes.append(f"Theirs, seed {seed}: {found['accuracy']:.2%} after {found['epochs']} epochs.")
    return found["figure"] if found["accuracy"] >= ENOUGH else float("inf")
