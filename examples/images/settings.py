"""Settings of your own. This file is yours.

Each field is a flag of `train` and a key in configs/train.yaml, and a sweep can search its values.
The settings that every training has are in engine/config.py, and those of plug-ins in plugins/. To
change the default of one of them, add a field with the same name here.
"""

from dataclasses import dataclass
from typing import Literal

from . import plugins
from .engine import Fraction, Positive, Rate


@dataclass(frozen=True, kw_only=True)
class Settings(plugins.Settings):
    """All settings of a run."""

    dataset: str = "synthetic"
    """how the images in DATA_DIR are stored: files, tar or parquet;
    synthetic: made-up images, which need no file"""
    classes: Positive = 10
    """number of classes"""
    samples: Positive | None = None
    """images in all training shards, if `make data` has not counted them"""
    size: Positive = 48
    """height and width of the network's input, in pixels"""
    least_crop: Fraction = 0.25
    """smallest share of an image's area that a random crop for training has"""
    layers: tuple[Positive, ...] = (1, 1, 1)
    """number of blocks in each stage of the network;
    each stage after the first halves height and width and doubles the channels"""
    width: Positive = 16
    """number of channels in the first stage"""
    momentum: Fraction = 0.9
    """momentum of SGD, with Nesterov's update"""
    weight_decay: Fraction = 5e-4
    """weight decay (L2 penalty) of SGD; not for biases and batch norms"""
    label_smoothing: Fraction = 0.1
    """share of the target that is spread over all classes"""

    epochs: Positive = 5
    """passes over the training set"""
    test_batch_size: Positive = 200
    """samples in a batch of one rank in evaluation"""
    lr: Rate = 0.1
    """peak learning rate, for steps of LR_REFERENCE_BATCH samples"""
    lr_scaling: Literal["none", "linear", "sqrt"] = "linear"
    """scale the learning rate by the samples of a step, relative to LR_REFERENCE_BATCH"""
    lr_reference_batch: Positive = 256
    """samples in an optimizer step for which LR was chosen"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls after the warm-up"""
