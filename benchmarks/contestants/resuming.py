"""Loads most of an epoch, or resumes there, and prints the time and the batches that follow.

BENCHMARK_LOADER names the loader, and BENCHMARK_WORKERS is the number of its processes. If the file
BENCHMARK_STATE does not exist, this loads BENCHMARK_STOP batches, writes the loader's state to this
file, and continues. Otherwise it resumes from this file. It prints images per second until the
stop, or seconds until the next batch, and hashes of the images and classes that follow.
"""

import hashlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from itertools import islice, takewhile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from clock import batch_size
from demo import data
from demo.engine.data.steps import StepLoader
from demo.engine.position import Position
from demo.engine.ranks.world import World
from demo.settings import Settings
from image_loop import FOLDER, WORKERS, ImageFolder, transform
from PIL import Image

STOP, STATE = int(os.environ["BENCHMARK_STOP"]), Path(os.environ["BENCHMARK_STATE"])
AHEAD = 3  # number of batches to compare


class Ours:
    """The project's own loading."""

    def __init__(self, dataset: str) -> None:
        settings = Settings(
            dataset=dataset,
            data_dir=str(FOLDER.parent),
            batch_size=batch_size(),
            accumulate=1,
            seed=0,
            workers=WORKERS,
        )
        self.loader = StepLoader(data.load(settings).train, settings, World.alone(), None)
        self.had = 0

    def __iter__(self) -> Iterator[Any]:
        position = Position(epoch_steps=self.had, consumed=self.had * batch_size())
        for loaded in takewhile(len, self.loader.epoch(position)):
            self.had += 1
            yield loaded[0].batch

    def state_dict(self) -> int:
        """Return the number of batches that were taken."""
        return self.had

    def load_state_dict(self, state: int) -> None:
        """Continue after these batches."""
        self.had = state


def stateful() -> Any:  # noqa: ANN401 - a loader
    """Return torchdata's loader over files by class."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(ImageFolder(), batch_size(), shuffle=True, num_workers=WORKERS)


def mosaic() -> Any:  # noqa: ANN401
    """Return Mosaic's loader over shards of its own format, made at the first use."""
    # Mosaic's package imports torchvision for datasets that are not used here.
    for name, has in (("datasets", "VisionDataset"), ("transforms.functional", "to_tensor")):
        for part in ("torchvision", "torchvision.transforms", f"torchvision.{name}"):
            module = sys.modules.setdefault(part, ModuleType(part))
            module.__spec__ = ModuleSpec(part, None)
        setattr(module, has, object)
    import streaming

    folder = FOLDER.parent / "mds"
    if not folder.exists():
        columns = {"image": "bytes", "label": "int"}
        with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=2**25) as writer:
            for path in ImageFolder().paths:
                writer.write({"image": path.read_bytes(), "label": int(path.parent.name)})

    class Images(streaming.StreamingDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(index)
            return transform(Image.open(io.BytesIO(sample["image"]))), sample["label"]

    images = Images(local=str(folder), shuffle=True, batch_size=batch_size(), shuffle_seed=0)
    return streaming.StreamingDataLoader(images, batch_size=batch_size(), num_workers=WORKERS)


LOADERS: dict[str, Callable[[], Any]] = {
    "files": lambda: Ours("files"),
    "parquet": lambda: Ours("parquet"),
    "stateful": stateful,
    "mosaic": mosaic,
}


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of some tensors."""
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()


def main() -> None:
    """Load, and print the figures."""
    torch.manual_seed(0)
    figures: dict[str, float | str] = {}
    began = time.perf_counter()
    loader = LOADERS[os.environ["BENCHMARK_LOADER"]]()
    if STATE.exists():
        loader.load_state_dict(torch.load(STATE, weights_only=False))
        batches = iter(loader)
        following = [next(batches)]
        figures["figure"] = time.perf_counter() - began
    else:
        batches = iter(loader)
        following = [next(batches)]
        began = time.perf_counter()
        for _ in islice(batches, STOP - 1):
            pass
        figures["figure"] = (STOP - 1) * batch_size() / (time.perf_counter() - began)
        torch.save(loader.state_dict(), STATE)
        following = []
    following += islice(batches, AHEAD - len(following))
    figures["images"] = digest(images.contiguous() for images, _ in following)
    figures["order"] = digest(labels for _, labels in following)
    print(json.dumps(figures), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
