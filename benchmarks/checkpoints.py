"""How long a checkpoint delays the training loop, compared with the time of a step."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .compare import Comparison, in_turns
from .ranks import CONTESTANTS, Setting, start

SIZES = {"the example": 0, "a network of 300 MB": 300}  # and twice that with its optimizer's state

EXAMPLE, LARGE = (600, 100), (12, 4)  # steps, and steps between checkpoints


def measure(setting: Setting, repeats: int) -> Iterator[Comparison]:
    """Compare, for each strategy, saves in a thread with saves that the loop waits for."""
    for name, megabytes in SIZES.items():
        for strategy in ("ddp", "fsdp"):
            yield _compare(setting, repeats, name, megabytes, strategy)


def _compare(
    setting: Setting, repeats: int, name: str, megabytes: int, strategy: str
) -> Comparison:
    steps: list[float] = []

    def held_up(at_once: bool, synced: bool = True) -> float:
        figures = median_milliseconds(setting, megabytes, strategy, at_once, synced)
        if not at_once:
            steps.append(figures["step"])
        return figures["save"]

    figures = in_turns(
        {
            "written during the training": lambda: held_up(False),
            "written at once": lambda: held_up(True),
            "the same without fsync": lambda: held_up(True, synced=False),
        },
        repeats,
    )
    comparison = Comparison(
        title=f"Time that a checkpoint stops the training, {name}, {strategy}",
        unit="ms",
        baseline="one step",
        figures={**figures, "one step": steps},
        target="less than a step",
        limit=1,
    )
    comparison.met = comparison.ratios["written during the training"] < 1
    return comparison


def median_milliseconds(
    setting: Setting, megabytes: int, strategy: str, at_once: bool, synced: bool = True
) -> dict[str, float]:
    """Return the median milliseconds of a `step` and of a `save` in one training.

    Args:
        setting: the settings of the measurement.
        megabytes: size of a larger network's parameters; 0 for the example's network.
        strategy: ddp or fsdp.
        at_once: whether the training waits for the write.
        synced: whether to call fsync, as the project does.
    """
    steps, every = LARGE if megabytes else EXAMPLE
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
            # The larger network need not learn, but its loss must stay finite.
            *(["--lr=1e-5"] if megabytes else []),
            env={
                "BENCHMARK_AT_ONCE": "yes" if at_once else "",
                "BENCHMARK_SYNCED": "yes" if synced else "",
                "BENCHMARK_MEGABYTES": str(megabytes),
                "BENCHMARK_RESULT": str(result),
            },
        )
        return json.loads(result.read_text())
