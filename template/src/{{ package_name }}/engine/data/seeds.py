"""Seeds that are functions of what they are for, so that nothing random must be saved.

train.py seeds each step, batches.py each sample and the order of an epoch, stream.py each sample of
a shard, evaluate.py an evaluation.
"""

import random

import numpy
import torch


def derive(*key: object) -> int:
    """Return a seed made from the key alone; other keys give unrelated seeds."""
    return random.Random(" ".join(map(str, key))).getrandbits(62)


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, NumPy and Python.

    Called before each step and each sample: a resumed run then draws what the uninterrupted one
    would have drawn. (`torch.manual_seed` does the same for every kind of device, slower.)
    """
    torch.default_generator.manual_seed(seed)
    for gpus in (torch.cuda, torch.xpu):
        if gpus.is_initialized():
            gpus.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)
