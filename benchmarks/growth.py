"""What a rank needs as the world grows: one real rank of up to 4,096, the others simulated."""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date

from .compare import short
from .ranks import CONTESTANTS, Setting, environment, project

SIZES = (2, 8, 64, 512, 4096)  # world sizes with a fake process group
MESHES = (2, 4, 8, 16, 32, 64)  # world sizes with all ranks on this machine

Figures = Mapping[str, float]


@dataclass
class Growth:
    """Figures (measured numbers) by world size.

    Attributes:
        title: what was measured.
        unit: unit of the figures.
        sizes: world sizes.
        figures: for each quantity, a median for each size.
        notes: explanations of the figures.
        date: when it was measured, as YYYY-MM-DD.
    """

    title: str
    unit: str
    sizes: list[int]
    figures: dict[str, list[float]]
    notes: list[str] = field(default_factory=list)
    date: str = field(default_factory=lambda: date.today().isoformat())

    @property
    def exponents(self) -> dict[str, float]:
        """How each quantity grows between the last two sizes: 0 not at all, 1 like the world."""
        step = math.log(self.sizes[-1] / self.sizes[-2])
        return {name: math.log(each[-1] / each[-2]) / step for name, each in self.figures.items()}

    def as_markdown(self) -> str:
        """Return a table in Markdown."""
        sizes = " | ".join(f"{size:,}" for size in self.sizes)
        lines = [
            f"### {self.title}",
            "",
            f"| {self.unit}, by ranks | {sizes} | exponent |",
            f"|---|{'--:|' * (len(self.sizes) + 1)}",
        ]
        for name, exponent in self.exponents.items():
            shown = " | ".join(short(value) for value in self.figures[name])
            lines.append(f"| {name} | {shown} | {exponent:.2f} |")
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes), ""])


def measure(setting: Setting, repeats: int) -> list[Growth]:
    """Run rank 0 of worlds of each size. Trainings are measured in bytes, so they run only once."""
    parts = [play(setting, size, repeats, "growing", what="parts") for size in SIZES]
    ddp = [play(setting, size, 1, "growing", what="ddp") for size in SIZES]
    fsdp = [play(setting, size, 1, "growing", what="fsdp") for size in SIZES]
    # Gloo connects all pairs of ranks at the start (eager), or each at its first message (lazy).
    eager = [play(setting, size, repeats, "mesh") for size in MESHES]
    lazy = [play(setting, size, repeats, "mesh", TORCH_GLOO_LAZY_INIT="1") for size in MESHES]
    return [
        _growth(
            "Growth: an epoch's order and its first batch",
            "ms",
            {"samples by index": (parts, "index ms"), "a stream of shards": (parts, "stream ms")},
        ),
        _growth(
            "Growth: resumed in an epoch of 10 million samples",
            "ms",
            {
                "samples by index": (parts, "index resumed ms"),
                "a stream of shards of known sizes": (parts, "stream resumed ms"),
            },
        ),
        _growth(
            "Growth: Python's objects, at most",
            "KiB",
            {
                "samples by index": (parts, "index KiB"),
                "a stream of shards": (parts, "stream KiB"),
                "joining the ranks": (parts, "join KiB"),
            },
        ),
        _growth(
            "Growth: set-up",
            "ms",
            {
                "joining the ranks": (parts, "join ms"),
                "DDP": (parts, "ddp ms"),
                "FSDP": (parts, "fsdp ms"),
            },
        ),
        _growth(
            "Growth: parameters and optimizer on a rank",
            "MiB",
            {"DDP": (parts, "ddp MiB"), "FSDP": (parts, "fsdp MiB")},
        ),
        _growth(
            "Growth: memory of rank 0 that trains the example, at most",
            "MiB",
            {"DDP": (ddp, "peak MiB"), "FSDP": (fsdp, "peak MiB")},
        ),
        _growth(
            "Growth: planning a save with FSDP",
            "ms",
            {
                "a rank plans its part": (parts, "own plan ms"),
                "rank 0 joins all plans": (parts, "all plans ms"),
                "rank 0 uses them again": (parts, "all plans again ms"),
                "a rank reads the list of parts": (parts, "list ms"),
            },
        ),
        _growth(
            "Growth: size of the plans",
            "KiB",
            {
                "a rank's plan": (parts, "own plan KiB"),
                "all plans, at rank 0": (parts, "all plans KiB"),
                "the list of parts": (parts, "list KiB"),
            },
        ),
        _growth(
            "Growth: training the example",
            "ms",
            {
                "a step": (ddp, "step ms"),
                "a line of the log": (parts, "log ms"),
                "an evaluation": (ddp, "evaluation ms"),
            },
        ),
        _growth(
            "Growth: a logged step",
            "bytes",
            {"written by rank 0": (ddp, "line bytes")},
        ),
        _growth(
            "Growth: files",
            "files",
            {
                "run folder": (ddp, "files"),
                "a checkpoint with DDP": ([{"one": 1} for _ in SIZES], "one"),
                "a checkpoint with FSDP": (parts, "shard files"),
            },
        ),
        _growth(
            "Growth: what is written of a run once",
            "KiB",
            {"settings, provenance, summary": (ddp, "written once KiB")},
        ),
        _growth(
            "Growth: connections of a rank through Gloo",
            "open descriptors",
            {
                "all at once": (eager, "descriptors"),
                "at the first message": (lazy, "descriptors"),
            },
            MESHES,
        ),
        _growth(
            "Growth: a vote through Gloo",
            "ms",
            {"until all ranks know": (eager, "vote ms")},
            MESHES,
        ),
    ]


def _growth(
    title: str,
    unit: str,
    quantities: Mapping[str, tuple[Sequence[Figures], str]],
    sizes: Sequence[int] = SIZES,
) -> Growth:
    """Return a `Growth`. `quantities` has, by shown name, the measured figures and their name."""
    figures = {shown: [at[name] for at in found] for shown, (found, name) in quantities.items()}
    return Growth(title, unit, list(sizes), figures)


def play(
    setting: Setting,
    size: int,
    repeats: int,
    program: str,
    what: str = "",
    **env: str,
) -> Figures:
    """Run a contestant as rank 0 of a world, in new processes; return medians.

    Raises:
        RuntimeError: the contestant failed.
    """
    env = {
        **environment(setting),
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size)},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": "1"},  # nobody connects to it
        **{"BENCHMARK_WHAT": what},
        **env,
    }
    found = []
    for _ in range(repeats):
        command = [sys.executable, str(CONTESTANTS / f"{program}.py")]
        done = subprocess.run(command, cwd=project(), env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{program} of {size} ranks:\n{done.stderr[-3000:]}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    shown = "  ".join(f"{name} {short(value)}" for name, value in medians.items())
    print(f"  {program} {what} {size}: {shown}", flush=True)
    return medians
