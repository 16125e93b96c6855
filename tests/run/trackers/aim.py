"""Reads runs with Aim's own reader."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import aim
from aim.storage.context import Context
from filelock import FileLock

from . import Shown, by_step

COMMAND = Path(sys.executable).with_name("aim")
# The methods that return a sequence, by the kind.
GETTERS = {
    "metric": "metric",
    "images": "image_sequence",
    "distributions": "distribution_sequence",
    "texts": "text_sequence",
}


def places(run_dir: Path) -> list[Path]:
    """Return what Aim makes for a run."""
    return [run_dir.parent / ".aim"]


def opened(store: Path) -> list[aim.Run]:
    """Return Aim's own view of the runs in a repository, by name."""
    # The index is what Aim reads; its UI would make it, too.
    command = [str(COMMAND), "storage", "--repo", str(store), "reindex", "-y"]
    with FileLock(store.with_name(f"{store.name}.reindex")):
        subprocess.run(command, check=True, capture_output=True)
    repo = aim.Repo(str(store))
    found = [aim.Run(each, repo=repo, read_only=True) for each in repo.list_all_runs()]
    return sorted(found, key=lambda run: run.name)


def runs(store: Path) -> list[Shown]:
    """Return what Aim shows of the runs in a store."""
    return [shown(run) for run in opened(store)]


def series(run: aim.Run, kind: str, name: str) -> list[tuple[int, Any, float]]:
    """Return the steps, values and times of a name in a run."""
    steps, (values, _, times) = getattr(run, f"get_{kind}")(name, Context({})).data.items_list()
    return sorted(zip(steps, values, times, strict=True), key=lambda each: each[0])


def everything(run: aim.Run, kind: str) -> dict[str, dict[int, Any]]:
    """Return all values of a kind in a run, by name and step."""
    known = run.collect_sequence_info(kind)[kind]
    found = {each["name"]: series(run, GETTERS[kind], each["name"]) for each in known}
    return {n: by_step(n, [(step, value) for step, value, _ in each]) for n, each in found.items()}


def shown(run: aim.Run) -> Shown:
    """Return what Aim shows of a run."""
    numbers, texts = everything(run, "metric"), everything(run, "texts")
    log = run.get_terminal_logs()
    lines = [line.data for line in log.data.values_list()[0]] if log else []
    losses = series(run, "metric", "train/loss") if "train/loss" in numbers else []
    return Shown(
        name=run.name,
        experiment=run.experiment,
        tags=run.tags,
        settings=run["settings"],
        provenance=run["provenance"],
        status=run["status"],
        error=run["error"],
        numbers=numbers,
        times={step: time for step, _, time in losses},
        images={
            name: {step: image.size for step, image in found.items()}
            for name, found in everything(run, "images").items()
        },
        histograms={
            name: {step: each.weights.sum() for step, each in found.items()}
            for name, found in everything(run, "distributions").items()
        },
        texts={"log": "\n".join(lines)}
        | {name.replace("/", "-"): [*found.values()][-1].data for name, found in texts.items()},
    )
