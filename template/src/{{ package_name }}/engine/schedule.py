"""The learning rate schedule: a factor for the batch size, and a factor that changes over the run.

Both are pure functions, so a checkpoint stores no state for them. To use your own schedule,
override the method `schedule` in model.py.
"""

import math

from .config import Settings


def scaling(settings: Settings, samples_per_step: int) -> float:
    """Return the factor for learning rates if a step has `samples_per_step` samples on all ranks.

    Linear scaling: Goyal et al. 2017 (arXiv:1706.02677). Square root: Krizhevsky 2014
    (arXiv:1404.5997).
    """
    ratio = samples_per_step / settings.lr_reference_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[settings.lr_scaling]


def lr_factor(settings: Settings, progress: float) -> float:
    """Return the factor for learning rates at `progress`, from 0 (start) to 1 (end of the run).

    The factor rises in the warm-up and then falls.

    With `linear` or `cosine` this is a one-cycle policy (Smith 2018, arXiv:1708.07120).
    """
    if progress < settings.warmup:
        return 0.04 + 0.96 * progress / settings.warmup
    left = max(0.0, (1 - progress) / (1 - settings.warmup))
    return {
        "constant": 1.0,
        "linear": left,
        "cosine": (1 - math.cos(math.pi * left)) / 2,
    }[settings.schedule]
