"""The way of pytorch/examples and of many scripts made from it: a PIL image for each sample."""

import os

import numpy as np
import torch
import torch.distributed as dist
from clock import Clock, batch_size, device
from demo.data import Digits
from PIL import Image
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from workload import clip, digits, loss, network, optimizer


class Pictures(Dataset):
    """MNIST as in torchvision: each sample is a PIL image, turned into a normalized tensor."""

    def __init__(self) -> None:
        self.pixels, self.labels = digits()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.pixels[index].numpy())
        tensor = torch.from_numpy(np.array(image, np.uint8)).unsqueeze(0).float().div(255)
        mean, deviation = Digits.MEAN / 255, Digits.DEVIATION / 255
        return tensor.sub(mean).div(deviation), int(self.labels[index])


def loader(batch: int, where: torch.device, seed: int = 0) -> DataLoader:
    """Return this rank's batches; with a GPU, with a worker and pinned memory, as in examples."""
    data = Pictures()
    options = {"num_workers": 1, "pin_memory": True, "persistent_workers": True}
    return DataLoader(
        data,
        batch,
        sampler=DistributedSampler(data, seed=seed),
        drop_last=True,
        **(options if where.type == "cuda" else {}),
    )


def main() -> None:
    """Train for the timed number of steps."""
    where = device()
    dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    batches = loader(batch_size(), where)
    plain = network().to(where)
    ddp = DistributedDataParallel(plain)
    update = optimizer(plain)
    clock, done, epoch = Clock(), False, 0
    while not done:
        batches.sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(batches):
            inputs, targets = inputs.to(where), targets.to(where)
            update.zero_grad()
            value = loss(ddp, inputs, targets)
            value.backward()
            clip(plain)
            update.step()
            if step % 10 == 0:
                value.item()  # pytorch/examples prints it
            if done := clock.step():
                break
        epoch += 1
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
