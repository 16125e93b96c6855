"""Images per second if loading is most of the work: JPEGs are read, decoded, cropped, mirrored."""

import re
import tempfile
from functools import cache, partial
from pathlib import Path

from . import jpegs
from .compare import Comparison, in_turns
from .ranks import Setting, lines, peer, project, train

SHARDS, EACH, EDGE = 16, 1250, 256
BATCH, WARM_UP, STEPS = 256, 10, 40
CHANGES = {
    "src/demo/model.py": {r"images\.permute": "images[:, ::16, ::16].permute"},
    "src/demo/settings.py": {
        "size: Positive = .*": "size: Positive = 224",
        r"= \(1, 1, 1\)": "= (1,)",
    },
    "configs/train.yaml": {r"(?m)^(size|layers): .*\n": ""},
}
LEAST = 0.9  # target: this share of the rate at which the cores only decode
PEERS = {
    "files, bare loop": "files",
    "files, bare loop with the same transform": "files, same transform",
    "tar, webdataset": "webdataset",
    "Parquet, datasets": "datasets",
}
OURS = {"this project, Parquet": "parquet", "this project, tar": "tar"}
OURS |= {"this project, files": "files"}


def measure(setting: Setting, repeats: int) -> list[Comparison]:
    """Compare images per second of all ranks, where each rank loads its own images."""
    with tempfile.TemporaryDirectory(prefix="jpegs-") as images:
        folder = jpegs.write(Path(images), SHARDS, EACH, EDGE)
        contestants = {name: partial(ours, setting, kind, folder) for name, kind in OURS.items()}
        contestants["decoding alone"] = partial(theirs, setting, "decoding", folder)
        for name, loader in PEERS.items():
            contestants[name] = partial(theirs, setting, loader, folder)
        lightning = partial(theirs, setting, "files", folder, "image_lightning")
        figures = in_turns({**contestants, "files, Lightning": lightning}, repeats)
    comparison = Comparison(
        title="Images per second, JPEGs of 256 pixels",
        unit="images/s",
        baseline="decoding alone",
        figures=figures,
        target=f"at least {LEAST} of decoding alone with shards, and more than all others",
        limit=LEAST,
    )
    best = max(comparison.ratios[name] for name in list(OURS)[:2])
    others = [comparison.ratios[name] for name in (*PEERS, "files, Lightning")]
    comparison.met = best >= LEAST and best > max(others)
    return [comparison]


@cache
def example() -> Path:
    """Return a project with the example `images`, for photographs, and with a cheap network.

    The network sees only every 16th pixel of a row and of a column, so that it takes little time.
    A GPU would do its work at the same time as the loading.
    """
    folder = project(example="images")
    for name, changes in CHANGES.items():
        (path,) = folder.glob(name)
        text = path.read_text("utf-8")
        for old, new in changes.items():
            assert re.search(old, text), (name, old)
            text = re.sub(old, new, text)
        path.write_text(text, "utf-8")
    return folder


def ours(setting: Setting, kind: str, images: Path, steps: int = STEPS) -> float:
    """Return images per second of this project, with TensorBoard, its log and checkpoints."""
    run_dir = train(
        setting,
        f"--dataset={kind}",
        f"--data-dir={images}",
        f"--batch-size={BATCH}",
        f"--max-steps={WARM_UP + steps}",
        f"--log-every={WARM_UP}",
        "--epochs=1000",
        "--trackers=tensorboard",
        folder=example(),
    )
    logged = {line["step"]: line["time"] for line in lines(run_dir) if "train/loss" in line}
    seconds = logged[WARM_UP + steps] - logged[WARM_UP]
    return steps * BATCH * setting.ranks / seconds


def theirs(
    setting: Setting, loader: str, images: Path, program: str = "image_loop", steps: int = STEPS
) -> float:
    """Return images per second of another loader."""
    options = {"loader": loader, "images": images, "workers": 0, "batch": BATCH}
    return peer(setting, program, folder=example(), warm_up=WARM_UP, steps=steps, **options)
