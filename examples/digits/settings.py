"""Settings of your own: a field here is a flag, a line of configs/train.yaml, and can be searched.

This file is yours. The settings of every training are in engine/config.py; a field of the same
name here gives one of them another default.
"""

from dataclasses import dataclass

from . import engine
from .engine import Fraction, Positive


@dataclass(frozen=True, kw_only=True)
class Settings(engine.Settings):
    """All settings of a run."""

    dataset: str = "mnist"
    """mnist, or synthetic, which needs no file"""
    validation_size: Positive = 5000
    """samples of the training set that are held out"""
    streaming: bool = False
    """read the training set as a stream of shards instead of by index"""
    momentum: Fraction = 0.9
    """of SGD, with Nesterov's update"""
    weight_decay: Fraction = 2e-3
    """L2 penalty"""
    label_smoothing: Fraction = 0.1
    """share of the target spread over the other classes"""
