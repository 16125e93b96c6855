"""Reads runs with TensorBoard's own reader."""

import json
from pathlib import Path

import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from . import Shown, by_step


def places(run_dir: Path) -> list[Path]:
    """Return what TensorBoard makes for a run."""
    return [run_dir / "tensorboard"]


def opened(run_dir: Path) -> EventAccumulator:
    """Return TensorBoard's own view of a run."""
    sizes = {"scalars": 0, "images": 0, "histograms": 0, "tensors": 0}
    return EventAccumulator(str(run_dir / "tensorboard"), size_guidance=sizes).Reload()


def text(events: EventAccumulator, name: str) -> str:
    """Return the newest text of a name."""
    return events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()


def runs(store: Path) -> list[Shown]:
    """Return what TensorBoard shows of the runs in a store."""
    return [shown(folder.parent) for folder in store.glob("*/tensorboard")]


def shown(run_dir: Path) -> Shown:
    """Return what TensorBoard shows of a run."""
    events = opened(run_dir)
    tags = events.Tags()
    texts = {name.removesuffix("/text_summary") for name in tags["tensors"]}
    said = {name: text(events, name).strip("`\n") for name in texts}
    settings = yaml.safe_load(said["settings"])
    status, _, error = said["status"].partition(": ") if "status" in said else (None, "", "")
    scalars = {name: events.Scalars(name) for name in tags["scalars"]}
    return Shown(
        name=f"{run_dir.parent.name}/{run_dir.name}",
        experiment=settings["experiment"],
        tags=settings["tags"],
        settings=settings,
        provenance=json.loads(said["provenance"]),
        status=status,
        error=error or None,
        # A name whose values are all hidden has none.
        numbers={
            name: by_step(name, [(each.step, each.value) for each in found])
            for name, found in scalars.items()
            if found
        },
        times={each.step: each.wall_time for each in scalars.get("train/loss", ())},
        images={
            name: by_step(name, [(e.step, (e.width, e.height)) for e in events.Images(name)])
            for name in tags["images"]
        },
        histograms={
            name: by_step(name, [(e.step, e.histogram_value.num) for e in events.Histograms(name)])
            for name in tags["histograms"]
        },
        texts={name.replace("/", "-"): words for name, words in said.items()},
        precision=1e-6,  # of float32
    )
