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
    """csv: the file TABLE in DATA_DIR; synthetic: made-up rows, which need no file"""
    table: str = "table.csv"
    """name of the CSV file;
    its first line has the names of the columns, each other line has the numbers of one sample"""
    columns: tuple[str, ...] = ("x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8")
    """names of the columns to predict from"""
    target: str = "y"
    """name of the column to predict"""
    target_scale: Rate = 5.0
    """number that the target is divided by for the network, about its standard deviation"""
    held_out: Fraction = 0.1
    """share of the rows that is held out for validation; an equal share is held out for the test"""
    layers: Positive = 3
    """number of hidden layers"""
    width: Positive = 128
    """number of features in a hidden layer"""
    dropout: Fraction = 0.0
    """dropout probability"""
    weight_decay: Fraction = 0.01
    """weight decay of AdamW"""

    epochs: Positive = 5
    """passes over the training set"""
    lr: Rate = 5e-3
    """peak learning rate"""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """how the learning rate falls after the warm-up"""
