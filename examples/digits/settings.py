"""Settings of your own. This file is yours.

Each field is a flag of `train` and a key in configs/train.yaml, and a sweep can search its values.
The settings that every training has are in engine/config.py, and those of plug-ins in plugins/. To
change the default of one of them, add a field with the same name here.
"""

from dataclasses import dataclass

from . import plugins
from .engine import Fraction, Positive


@dataclass(frozen=True, kw_only=True)
class Settings(plugins.Settings):
    """All settings of a run."""

    dataset: str = "mnist"
    """mnist; or synthetic: made-up digits, which need no file"""
    validation_size: Positive = 5000
    """samples of the training set that are held out for validation"""
    streaming: bool = False
    """read the training set as a stream of shards instead of by index"""
    momentum: Fraction = 0.9
    """momentum of SGD, with Nesterov's update"""
    weight_decay: Fraction = 2e-3
    """weight decay (L2 penalty) of SGD"""
    label_smoothing: Fraction = 0.1
    """share of the target that is spread over all classes"""
