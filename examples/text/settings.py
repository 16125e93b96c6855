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
    """text: the bytes of the *.txt files in DATA_DIR;
    tokens: train.bin and validation.bin in DATA_DIR;
    synthetic: made-up sentences, which need no file"""
    vocabulary: Positive = 256
    """number of different tokens: 256 for bytes, or that of your tokenizer"""
    held_out: Fraction = 0.05
    """share of the text, at its end, that is held out for the test;
    an equal share before it is held out for validation"""
    context: Positive = 64
    """number of tokens that the network sees at once"""
    layers: Positive = 4
    """number of blocks in the network"""
    heads: Positive = 4
    """number of attention heads in a block"""
    width: Positive = 64
    """number of features of a token inside the network, a multiple of HEADS"""
    dropout: Fraction = 0.0
    """dropout probability"""
    weight_decay: Fraction = 0.1
    """weight decay of AdamW, only on the weights of linear layers"""

    batch_size: Positive = 32
    """samples, each of CONTEXT tokens, in a batch of one rank"""
    test_batch_size: Positive = 128
    """samples in a batch of one rank in evaluation"""
    lr: Rate = 3e-3
    """peak learning rate"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls after the warm-up"""
    warmup: Fraction = 0.1
    """share of the run in which the learning rate rises"""
    clip_norm: Rate | None = 1.0
    """largest norm of the gradient; for no limit, write null in YAML, or None as a flag"""
