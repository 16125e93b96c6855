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
    """text: the bytes of the *.txt files in DATA_DIR; tokens: train.bin and validation.bin there;
    synthetic: made-up sentences, which need no file"""
    vocabulary: Positive = 256
    """tokens that there are: 256 bytes, or as many as a tokenizer has"""
    held_out: Fraction = 0.05
    """share of a text's end that is for the test, and as much before it for the validation"""
    context: Positive = 64
    """tokens that the network sees at once"""
    layers: Positive = 4
    """blocks of the network"""
    heads: Positive = 4
    """attention heads of a block"""
    width: Positive = 64
    """features of a token inside the network; the heads share them"""
    dropout: Fraction = 0.0
    """share of the features that is dropped in training"""
    weight_decay: Fraction = 0.1
    """of AdamW, on the matrices alone"""

    batch_size: Positive = 32
    """samples of CONTEXT tokens that a rank takes at once"""
    test_batch_size: Positive = 128
    """the same in evaluation"""
    lr: Rate = 3e-3
    """peak learning rate"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls after the warm-up"""
    warmup: Fraction = 0.1
    """share of the run in which the learning rate rises"""
    clip_norm: Rate | None = 1.0
    """largest norm of the gradient; null in YAML, None as a flag: any"""
