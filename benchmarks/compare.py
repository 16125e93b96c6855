"""Measures contestants in turns, so that a disturbance of the machine affects all of them."""

import json
import os
import platform
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from .growth import Growth

T = TypeVar("T")


@dataclass
class Comparison:
    """The figures (measured numbers) of several contestants.

    Attributes:
        title: what was measured.
        unit: unit of the figures.
        baseline: the contestant whose figures the others are divided by.
        figures: the figures of each contestant, one for each repeat.
        target: the target for the ratio of the first contestant, in words; "" for none.
        limit: the target as a number, for the picture; None if it is not a ratio.
        met: whether the target is met; None if there is no target.
        date: when it was measured, as YYYY-MM-DD.
    """

    title: str
    unit: str
    baseline: str
    figures: dict[str, list[float]]
    target: str = ""
    limit: float | None = None
    met: bool | None = None
    notes: list[str] = field(default_factory=list)
    date: str = field(default_factory=lambda: date.today().isoformat())

    @property
    def medians(self) -> dict[str, float]:
        """The median figure of each contestant."""
        return {name: statistics.median(values) for name, values in self.figures.items()}

    @property
    def ratios(self) -> dict[str, float]:
        """The median of each contestant's ratio to the baseline in the same turn."""
        base = self.figures[self.baseline]
        return {
            name: statistics.median(
                value / other for value, other in zip(values, base, strict=True)
            )
            for name, values in self.figures.items()
        }

    def as_markdown(self) -> str:
        """Return a table in Markdown."""
        lines = [
            f"### {self.title}",
            "",
            f"| | {self.unit} | to {self.baseline} |",
            "|---|--:|--:|",
        ]
        medians, ratios = self.medians, self.ratios
        lines += [f"| {name} | {short(medians[name])} | {ratios[name]:.2f} |" for name in medians]
        if self.target:
            lines += ["", f"Target: {self.target}: **{'met' if self.met else 'not met'}**."]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes), ""])


def in_turns(contestants: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """Measure each contestant once in each turn; return what was measured, by name.

    Every second turn has the reverse order, so that no contestant always comes after the same one.
    """
    figures: dict[str, list[T]] = {name: [] for name in contestants}
    for turn in range(repeats):
        names = list(contestants)
        for name in names if turn % 2 == 0 else reversed(names):
            figures[name].append(contestants[name]())
            print(f"  turn {turn + 1}  {name}: {as_text(figures[name][-1])}", flush=True)
    return figures


def machine() -> dict[str, str | int]:
    """Return facts that the figures depend on: processor, cores, GPU, versions."""
    import torch

    facts: dict[str, str | int] = {
        "processor": _processor(),
        "cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        facts["gpu"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return facts


def save(path: Path, comparison: "Comparison | Growth") -> None:
    """Save a comparison to the results of this machine, instead of an older one."""
    results = json.loads(path.read_text("utf-8")) if path.exists() else {"comparisons": {}}
    results["machine"] = machine()
    results["comparisons"][comparison.title] = asdict(comparison)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def as_text(measured: object) -> str:
    """Return a figure, or several by name, as a text."""
    if isinstance(measured, Mapping):
        return ", ".join(f"{name} {as_text(value)}" for name, value in measured.items())
    return short(measured) if isinstance(measured, int | float) else str(measured)


def short(value: float) -> str:
    """Return a figure with three digits, or with all digits before the decimal point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
