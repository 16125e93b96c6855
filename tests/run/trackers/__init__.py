"""What a tracker shows of a run, read with its own reader.

Each tracker has a module here, with two functions: `runs(store)` returns all runs that the tracker
shows of a store, which is the folder of an experiment, and `places(run_dir)` returns the files and
folders that it makes. In the first of them, something of the wrong kind keeps it from starting.

test_contract.py checks what all trackers have in common.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import metrics
import pytest
from variants import INSTALLED as TRACKERS

__all__ = ["TRACKERS", "Shown", "check_numbers", "reader", "show"]


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a tracker shows of a run. None stands for what it does not record.

    Attributes:
        status: the status of the last attempt, None if it has not ended and the tracker can't say
            that it is running.
        numbers: the values of each metric, by step.
        times: when each value of `train/loss` was measured, by step.
        images: width and height of each picture, by name and step.
        histograms: the number of values in each histogram, by name and step.
        tables: the steps of each table, by name. If it is None, tables are texts.
        texts: the newest text of each name, with `-` for `/`.
        precision: the largest relative error of a number.
        keeps: the tracker keeps what was logged after the step from which a run was resumed.
    """

    name: str
    experiment: str
    tags: Collection[str]
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]
    status: str | None
    error: str | None
    numbers: Mapping[str, Mapping[int, float]]
    times: Mapping[int, float] | None = None
    images: Mapping[str, Mapping[int, tuple[int, int]]] = field(default_factory=dict)
    histograms: Mapping[str, Mapping[int, float]] | None = None
    tables: Mapping[str, Collection[int]] | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    precision: float = 0.0
    keeps: bool = False


def reader(tracker: str) -> ModuleType:
    """Return the module that reads a tracker."""
    return import_module(f".{tracker}", __name__)


def show(tracker: str, run_dir: Path) -> Shown:
    """Return what a tracker shows of a run, which must be there once, however often it resumed."""
    name = f"{run_dir.parent.name}/{run_dir.name}"
    (shown,) = (each for each in reader(tracker).runs(run_dir.parent) if each.name == name)
    return shown


def by_step(name: str, pairs: Collection[tuple[int, Any]]) -> dict[int, Any]:
    """Return values by step. Each step must be there once."""
    found = dict(sorted(pairs, key=lambda pair: pair[0]))
    assert len(found) == len(pairs), f"a step of {name} is there twice"
    return found


def check_numbers(shown: Shown, run_dir: Path, lost: Collection[int] | None = None) -> None:
    """Each number of metrics.jsonl is there, and no other.

    A tracker that keeps what was logged after the step from which the run was resumed may have the
    steps `lost`, too. If these are not known, it has at least the same steps. Of steps that were
    repeated, it has the first values, which differ in what depends on the machine's speed.
    """
    logged = metrics.series(run_dir)
    assert shown.numbers.keys() == logged.keys()
    for name, values in logged.items():
        found = shown.numbers[name]
        if shown.keeps and lost is not None:
            found = {step: value for step, value in found.items() if step not in lost}
            values = {step: value for step, value in values.items() if step not in lost}
        assert list(found) == list(values), name
        if not shown.keeps or lost is not None or not metrics.measured(name):
            assert found == pytest.approx(values, rel=shown.precision, abs=0, nan_ok=True), name
