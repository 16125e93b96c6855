"""A bare loop over JPEG images, with the loader that BENCHMARK_LOADER names."""

import os
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from clock import Clock, batch_size, device
from demo import model
from demo.files import Sample
from demo.settings import Settings
from demo.transforms import augment, random_part
from PIL import Image
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIZE = 224
FOLDER = Path(os.environ["BENCHMARK_IMAGES"]) / "train"
WORKERS = int(os.environ["BENCHMARK_WORKERS"])
Batches = Iterable[tuple[Tensor, Tensor]]


def transform(image: Image.Image) -> Tensor:
    """Crop, resize and mirror at random, like torchvision's transforms of PIL images."""
    image = image.convert("RGB")
    part = random_part(image.width, image.height, least=0.25)
    box = [share * edge for share, edge in zip(part, 2 * image.size, strict=True)]
    image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def same_transform(content: bytes) -> Tensor:
    """Do the same as the project."""
    return augment(Sample("", content, 0), SIZE, least=0.25).permute(2, 0, 1)


class ImageFolder(Dataset):
    """torchvision's `ImageFolder`: a folder for each class, a PIL image for each file."""

    def __init__(self, same: bool = False) -> None:
        self.paths, self.same = sorted(FOLDER.glob("*/*.jpg")), same

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = self.paths[index]
        if self.same:
            return same_transform(path.read_bytes()), int(path.parent.name)
        with path.open("rb") as file:
            return transform(Image.open(file)), int(path.parent.name)


def image_folder(same: bool = False) -> Batches:
    """Return a DataLoader over files by class."""
    data = ImageFolder(same)
    sampler = DistributedSampler(data) if dist.is_initialized() else None
    return DataLoader(
        data,
        batch_size(),
        sampler=sampler,
        shuffle=None if sampler else True,
        num_workers=WORKERS,
        drop_last=True,
    )


def web_dataset() -> Batches:
    """Return webdataset's own pipeline over tar shards."""
    import webdataset

    shards = sorted(map(str, FOLDER.glob("*.tar")))
    samples = webdataset.WebDataset(
        shards, shardshuffle=len(shards), nodesplitter=webdataset.split_by_node
    )
    samples = samples.shuffle(1000).decode("pil").to_tuple("jpg", "cls")
    batches = samples.map_tuple(transform, int).batched(batch_size(), partial=False)
    return webdataset.WebLoader(batches, batch_size=None, num_workers=WORKERS)


def hugging_face() -> Batches:
    """Return the stream of Hugging Face's `datasets` over Parquet shards."""
    import datasets
    from datasets.distributed import split_dataset_by_node

    files = sorted(map(str, FOLDER.glob("*.parquet")))
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    data = data.cast_column("image", datasets.Image())
    data = split_dataset_by_node(data, dist.get_rank(), dist.get_world_size())

    def transformed(sample: dict) -> dict:
        return {"image": transform(sample["image"]), "label": sample["label"]}

    samples = data.shuffle(seed=0, buffer_size=1000).map(transformed)
    loader = DataLoader(samples, batch_size(), num_workers=WORKERS, drop_last=True)
    return ((batch["image"], batch["label"]) for batch in loader)


def decoded() -> Iterator[None]:
    """Only decode, crop and mirror images that are in memory, as the project does: the limit."""
    contents = [path.read_bytes() for path in sorted(FOLDER.glob("*/*.jpg"))[:2000]]
    while True:
        for first in range(0, len(contents) - batch_size(), batch_size()):
            for content in contents[first : first + batch_size()]:
                same_transform(content)
            yield None


LOADERS: dict[str, Callable[[], Batches]] = {
    "files": image_folder,
    "files, same transform": partial(image_folder, same=True),
    "webdataset": web_dataset,
    "datasets": hugging_face,
}


def main() -> None:
    """Train for the timed number of steps."""
    where = device()
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    clock, done = Clock(), False
    if os.environ["BENCHMARK_LOADER"] == "decoding":
        any(clock.step() for _ in decoded())
        os._exit(0)
    learner = model.Model(Settings())
    plain = learner.build().to(where)
    ddp = DistributedDataParallel(plain)
    update = learner.optimizers(plain)
    while not done:
        for batch in LOADERS[os.environ["BENCHMARK_LOADER"]]():
            update.zero_grad()
            images, labels = batch
            batch = (images.permute(0, 2, 3, 1).to(where), labels.to(where))
            learner.loss(ddp, batch).backward()
            update.step()
            if done := clock.step():
                break
    os._exit(0)


if __name__ == "__main__":
    main()
