"""Images per second, CPU time and memory of a bare loop, of this project, and of other programs."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from .compare import Comparison, in_turns
from .ranks import Setting, figures, start, with_clock

BATCHES = {"cpu": (64, 16), "cuda": (64, 256)}  # of each rank: a usual one, another one
LEAST = 1.0  # target: this share of the bare loop's rate
WARM_UP, STEPS = 100, {"cpu": 1000, "cuda": 3000}
PEERS = {
    "bare loop": "bare",
    "Lightning": "with_lightning",
    "Accelerate": "with_accelerate",
    "reference idiom": "reference",
}


def measure(setting: Setting, repeats: int) -> list[Comparison]:
    """Compare the programs, for each batch size."""
    comparisons = []
    for batch in BATCHES[setting.device]:
        steps = STEPS[setting.device]
        contestants = {"this project": partial(ours, setting, batch, steps)}
        for name, program in PEERS.items():
            contestants[name] = partial(
                figures, setting, program, batch=batch, warm_up=WARM_UP, steps=steps
            )
        found = in_turns(contestants, repeats)
        speed = compared(found, "figure", f"Images per second, batches of {batch}", "images/s")
        speed.target = f"at least {LEAST} of the bare loop, and more than all others"
        speed.limit = LEAST
        mine, _, *others = (speed.ratios[name] for name in contestants)
        speed.met = mine >= LEAST and mine > max(others)
        title = f"CPU time of a step, batches of {batch}"
        comparisons += [speed, compared(found, "cpu ms", title, "ms")]
    # Memory does not depend on the size of a batch here.
    for what, title in (
        ("rank MiB", "Peak memory of a rank"),
        ("command MiB", "Peak memory of all ranks and torchrun together"),
    ):
        comparisons.append(compared(found, what, title, "MiB"))
    return comparisons


def compared(
    found: Mapping[str, Sequence[Mapping[str, float]]], what: str, title: str, unit: str
) -> Comparison:
    """Return the comparison of one of the figures of each contestant."""
    values = {name: [each[what] for each in turns] for name, turns in found.items()}
    return Comparison(title=title, unit=unit, baseline="bare loop", figures=values)


def ours(
    setting: Setting, batch: int, steps: int, *flags: str, folder: Path | None = None
) -> dict[str, float]:
    """Return the figures of this project, with TensorBoard, its log and checkpoints."""
    return start(
        setting,
        *("-m", "demo", "train", *setting.flags),
        f"--batch-size={batch}",
        f"--max-steps={WARM_UP + steps}",
        "--epochs=1000",
        "--validate-epochs=1000",  # the others do not evaluate
        "--trackers=tensorboard",
        *flags,
        folder=with_clock(folder),
        env={
            "BENCHMARK_BATCH": str(batch),
            "BENCHMARK_WARM_UP": str(WARM_UP),
            "BENCHMARK_STEPS": str(steps),
        },
    )
