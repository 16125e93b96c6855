"""Seeds that are functions of what they are for, so that nothing random must be saved.

train.py seeds each step, steps.py its samples, batches.py the order of an epoch, evaluate.py an
evaluation.
"""

import random

import torch


def derive(*key: object) -> int:
    """Return a seed made from the key alone; other keys give unrelated seeds."""
    return random.Random(" ".join(map(str, key))).getrandbits(62)


def seed_torch(*key: object) -> None:
    """Seed torch's generators with the key.

    Called with the step's number before each step: a resumed run then draws what the uninterrupted
    one would have drawn. (`torch.manual_seed` does the same for every kind of device, slower.)
    """
    seed = derive(*key)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
