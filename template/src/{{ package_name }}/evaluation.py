"""Loss and accuracy over a whole dataset, exact on any number of ranks."""

import torch
from torch import nn
from torch.utils.data import Dataset

from . import model
from .config import Settings
from .distributed import World, autocast
from .sharding import evaluation_batches


@torch.no_grad()
def evaluate(
    network: nn.Module, dataset: Dataset, settings: Settings, world: World
) -> tuple[float, float]:
    """Return the mean loss and the accuracy over a map-style dataset; every rank calls this.

    Each sample is counted once, on one rank; the sums meet in one all-reduce. The network is the
    one inside DDP, whose forward passes wait for no other rank.
    """
    if world.size > 1:
        # Batch statistics are each rank's own during training: use rank 0's, as checkpoints do.
        for buffer in network.buffers():
            torch.distributed.broadcast(buffer, src=0)
    network.eval()
    sums = torch.zeros(2, dtype=torch.float64)
    count = 0
    for inputs, targets in evaluation_batches(
        dataset, settings.test_batch_size, world.rank, world.size, settings.workers
    ):
        targets = targets.to(world.device)
        with autocast(world.device, settings.precision):
            outputs = network(inputs.to(world.device)).float()
        loss = model.loss(outputs, targets, label_smoothing=0.0) * len(targets)
        correct = model.count_correct(outputs, targets)
        sums += torch.stack([loss, correct.to(loss.dtype)]).cpu()
        count += len(targets)
    network.train()
    loss_sum, correct_sum, total = world.sum([*sums.tolist(), count])
    return loss_sum / total, correct_sum / total
