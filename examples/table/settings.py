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
    """csv: the file TABLE in DATA_DIR; synthetic: made-up rows, which need no file"""
    table: str = "table.csv"
    """name of the file: a line of names, then a line of numbers for each sample"""
    columns: tuple[str, ...] = ("x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8")
    """names of the columns to predict from"""
    target: str = "y"
    """name of the column to predict"""
    target_scale: Rate = 5.0
    """what the target is divided by for the network: about how far it varies"""
    held_out: Fraction = 0.1
    """share of the rows that is for the validation, and as much for the test"""
    layers: Positive = 3
    """hidden layers of the network"""
    width: Positive = 128
    """features of a hidden layer"""
    dropout: Fraction = 0.0
    """share of the features that is dropped in training"""
    weight_decay: Fraction = 0.01
    """of AdamW"""

    epochs: Positive = 5
    """passes over the training set"""
    lr: Rate = 5e-3
    """peak learning rate"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls after the warm-up"""
