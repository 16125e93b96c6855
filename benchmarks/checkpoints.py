"""How long a checkpoint holds up the loop, beside the time of a step."""

import json
import tempfile
from pathlib import Path

from .compare import Comparison, in_turns
from .ranks import CONTESTANTS, Setting, start

SIZES = {"the example": 0, "a network of 300 MB": 300}  # and twice that with its optimizer's state


def measure(setting: Setting, repeats: int) -> list[Comparison]:
    """Compare what is written behind the training with what it waits for, for both strategies."""
    comparisons = []
    for name, megabytes in SIZES.items():
        for strategy in ("ddp", "fsdp"):
            contestants = {
                "written behind the training": "behind",
                "written at once": "at once",
                "one step": "step",
            }
            comparison = Comparison(
                title=f"What a checkpoint holds up, {name}, {strategy}",
                unit="ms",
                baseline="one step",
                figures=in_turns(
                    {
                        shown: lambda what=what, megabytes=megabytes, strategy=strategy: held_up(
                            setting, what, megabytes, strategy
                        )
                        for shown, what in contestants.items()
                    },
                    repeats,
                ),
                target="less than a step",
            )
            comparison.met = comparison.ratios["written behind the training"] < 1
            comparisons.append(comparison)
    return comparisons


def held_up(setting: Setting, what: str, megabytes: int, strategy: str) -> float:
    """Return the milliseconds of a step, or of a save."""
    steps, every = (40, 8) if megabytes else (600, 100)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        start(
            setting,
            str(CONTESTANTS / "saves.py"),
            f"--run-dir={folder}/run",
            *setting.flags,
            f"--strategy={strategy}",
            f"--max-steps={steps}",
            f"--checkpoint-every={every}",
            "--epochs=99",
            "--trackers=none",
            BENCHMARK_WHAT=what,
            BENCHMARK_MEGABYTES=str(megabytes),
            BENCHMARK_RESULT=str(result),
        )
        return json.loads(result.read_text())["figure"]
