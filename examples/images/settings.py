"""Settings of your own: a field here is a flag, a line of configs/train.yaml, and can be searched.

This file is yours. The settings of every training are in engine/config.py; a field of the same
name here gives one of them another default.
"""

from dataclasses import dataclass
from typing import Literal

from . import engine
from .engine import Fraction, Positive, Rate


@dataclass(frozen=True, kw_only=True)
class Settings(engine.Settings):
    """All settings of a run."""

    dataset: str = "synthetic"
    """how the images in DATA_DIR are stored: files, tar or parquet; synthetic needs none"""
    classes: Positive = 10
    """how many there are"""
    samples: Positive | None = None
    """in all shards to train on, where `make data` has not counted them"""
    size: Positive = 48
    """pixels of an image's edge, as the network sees it"""
    least_crop: Fraction = 0.25
    """smallest share of an image that is cut out to train on"""
    layers: tuple[Positive, ...] = (1, 1, 1)
    """blocks of each stage of the network; a stage halves the size and doubles the channels"""
    width: Positive = 16
    """channels of the first stage"""
    momentum: Fraction = 0.9
    """of SGD, with Nesterov's update"""
    weight_decay: Fraction = 5e-4
    """L2 penalty on the weights of convolutions and of the last layer"""
    label_smoothing: Fraction = 0.1
    """share of the target spread over the other classes"""

    epochs: Positive = 5
    """passes over the training set"""
    test_batch_size: Positive = 200
    """samples a rank takes at once in evaluation"""
    lr: Rate = 0.1
    """peak learning rate, for steps of LR_REFERENCE_BATCH samples"""
    lr_scaling: Literal["none", "linear", "sqrt"] = "linear"
    """scale the learning rate with the samples of a step, relative to LR_REFERENCE_BATCH"""
    lr_reference_batch: Positive = 256
    """samples of an optimizer step for which LR was chosen"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls after the warm-up"""
