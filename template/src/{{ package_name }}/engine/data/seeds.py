"""Seeds that depend only on their purpose, so that checkpoints need no state of generators.

`Training` (training.py) seeds the start equally on all ranks, and each step by its rank in
`prepare`. batches.py and stream.py seed each sample, and evaluate.py each evaluation.
"""

import random

import numpy
import torch


def derive(*key: object) -> int:
    """Return a seed that depends only on the key; different keys give unrelated seeds."""
    return random.Random(" ".join(map(str, key))).getrandbits(62)


def seed_generators(seed: int) -> None:
    """Seed the global random generators of torch, NumPy and Python.

    This is called before each step and each sample, so that a resumed run draws the same numbers as
    an uninterrupted one. `torch.manual_seed` also seeds torch's generators, but is slower.
    """
    torch.default_generator.manual_seed(seed)
    for gpus in (torch.cuda, torch.xpu):
        if gpus.is_initialized():
            gpus.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)
