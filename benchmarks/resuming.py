"""How loaders resume in the middle of an epoch: how fast, and whether with the same samples."""

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from . import jpegs
from .compare import Comparison, in_turns
from .loading import EACH, EDGE, SHARDS, example
from .ranks import Setting, figures

BATCH, WORKERS, OTHERS = 50, 2, 3
STOP = SHARDS * EACH // BATCH * 9 // 10
LOADERS = {
    "this project, files": "files",
    "this project, Parquet with sizes": "parquet",
    "files, StatefulDataLoader": "stateful",
}
if find_spec("streaming"):  # mosaicml-streaming needs another torchvision and older packages
    LOADERS["its own shards, Mosaic"] = "mosaic"
Figures = Mapping[str, float | str]


def measure(setting: Setting, repeats: int) -> list[Comparison]:
    """Compare by seconds until the next batch; note the results."""
    told: dict[str, list[Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="jpegs-") as folder:
        images = jpegs.write(Path(folder), SHARDS, EACH, EDGE)

        def contestant(name: str) -> float:
            told[name] = turn(setting, LOADERS[name], images)
            return float(told[name][1]["figure"])

        seconds = in_turns({name: partial(contestant, name) for name in LOADERS}, repeats)
    comparison = Comparison(
        title=f"Time to resume after nine tenths of {SHARDS * EACH:,} JPEGs, until the next batch",
        unit="s",
        baseline="files, StatefulDataLoader",
        figures=seconds,
    )
    comparison.notes = [f"{name}: {verdict(*each)}" for name, each in told.items()]
    return [comparison]


def turn(setting: Setting, loader: str, images: Path) -> list[Figures]:
    """Return the figures of a run without a stop, and of two that resume.

    The last one has another number of workers. Its figures are empty if the loader refuses this.
    """
    state = images / f"{loader}.pt"
    state.unlink(missing_ok=True)
    options = {"loader": loader, "images": images, "batch": BATCH, "stop": STOP, "state": state}
    run = partial(figures, replace(setting, ranks=1), "resuming", example(), **options)
    told = [run(workers=WORKERS), run(workers=WORKERS)]
    try:
        return [*told, run(workers=OTHERS)]
    except RuntimeError:
        return [*told, {}]


def verdict(whole: Figures, same: Figures, others: Figures) -> str:
    """Return a sentence about the speed of a loader, and about the samples after a stop."""
    return (
        f"{whole['figure']:,.0f} images/s until the stop; then with {WORKERS} workers again "
        f"{agreement(whole, same)}; with {OTHERS} {agreement(whole, others)}"
    )


def agreement(whole: Figures, resumed: Figures) -> str:
    """Return how far the batches of a resumed run equal those of a run without a stop."""
    if not resumed:
        return "an error"
    if resumed["images"] == whole["images"]:
        return "the same images, bit for bit"
    return "the same order, other crops" if resumed["order"] == whole["order"] else "other images"
