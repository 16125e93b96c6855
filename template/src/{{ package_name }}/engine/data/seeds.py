"""Seeds that depend only on what they are for, so that no state of a generator must be saved."""

import random

import numpy
import torch


def derive(*key: object) -> int:
    """Return a seed made from a key alone; different keys give unrelated seeds."""
    return random.Random(" ".join(map(str, key))).getrandbits(62)


def seed_generators(seed: int) -> None:
    """Seed the global generators of torch, NumPy and Python.

    Called before each step and each sample, so that a resumed run draws the same numbers as an
    uninterrupted one. `torch.manual_seed` does the same, but is slower.
    """
    torch.default_generator.manual_seed(seed)
    for gpus in (torch.cuda, torch.xpu):
        if gpus.is_initialized():
            gpus.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)
