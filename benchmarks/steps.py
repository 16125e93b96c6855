"""Images per second of a bare loop, of this project with its features, and of other programs."""

from functools import partial
from pathlib import Path

from .compare import Comparison, in_turns
from .ranks import Setting, lines, peer, train

BATCHES = {"cpu": (64, 16), "cuda": (64, 256)}  # of each rank: a usual one, another one
LEAST = 0.97  # target: this share of the bare loop's rate
WARM_UP, STEPS = 100, {"cpu": 500, "cuda": 3000}
PEERS = {
    "bare loop": "bare",
    "Lightning": "with_lightning",
    "Accelerate": "with_accelerate",
    "reference idiom": "reference",
}


def measure(setting: Setting, repeats: int) -> list[Comparison]:
    """Compare images per second of all ranks, for each batch size."""
    comparisons = []
    for batch in BATCHES[setting.device]:
        steps = STEPS[setting.device]
        contestants = {"this project": partial(ours, setting, batch, steps)}
        for name, program in PEERS.items():
            contestants[name] = partial(
                peer, setting, program, batch=batch, warm_up=WARM_UP, steps=steps
            )
        comparison = Comparison(
            title=f"Images per second, batches of {batch}",
            unit="images/s",
            baseline="bare loop",
            figures=in_turns(contestants, repeats),
            target=f"at least {LEAST} of the bare loop, and more than all others",
            limit=LEAST,
        )
        mine, *others = (comparison.ratios[name] for name in contestants)
        comparison.met = mine >= LEAST and mine > max(others[1:])
        comparisons.append(comparison)
    return comparisons


def ours(
    setting: Setting, batch: int, steps: int, *flags: str, folder: Path | None = None
) -> float:
    """Return images per second of this project, with TensorBoard, its log and checkpoints."""
    run_dir = train(
        setting,
        f"--batch-size={batch}",
        f"--max-steps={WARM_UP + steps}",
        "--epochs=1000",
        "--trackers=tensorboard",
        *flags,
        folder=folder,
    )
    logged = {line["step"]: line["time"] for line in lines(run_dir) if "train/loss" in line}
    seconds = logged[WARM_UP + steps] - logged[WARM_UP]
    return steps * batch * setting.ranks / seconds
