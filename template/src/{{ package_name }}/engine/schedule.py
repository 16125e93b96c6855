"""The factors on learning rates: for a world size, and over a run.

Both are functions of where the run is, so a checkpoint has nothing to save of them. A schedule of
your own is the method `schedule` of model.py.
"""

import math

from .config import Settings


def scaling(settings: Settings, samples_per_step: int) -> float:
    """Return the factor on learning rates for a step of so many samples over all ranks.

    Linear scaling is Goyal et al. 2017 (arXiv:1706.02677); by square root, Krizhevsky 2014
    (arXiv:1404.5997).
    """
    ratio = samples_per_step / settings.lr_reference_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[settings.lr_scaling]


def lr_factor(settings: Settings, progress: float) -> float:
    """Return the share of the peak at a progress from 0 to 1: up in the warm-up, then down.

    With the linear or cosine course this is a one-cycle policy (Smith 2018, arXiv:1708.07120).
    """
    if progress < settings.warmup:
        return 0.04 + 0.96 * progress / settings.warmup
    left = max(0.0, (1 - progress) / (1 - settings.warmup))
    return {
        "constant": 1.0,
        "linear": left,
        "cosine": (1 - math.cos(math.pi * left)) / 2,
    }[settings.schedule]
