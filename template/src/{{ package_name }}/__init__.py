"""Distributed training with PyTorch: one command for a laptop, one node, or many.

Yours, never changed by an update:
    model.py      what is trained: networks, optimizers, loss, metrics
    data.py       the datasets
    settings.py   settings of your own
    figures.py    pictures of an evaluation

The program, which updates merge with your edits:
    train.py      the training loop, validation, a stop by a signal, the end of a run
    learner.py    the class that model.py fills in
    __main__.py   the commands

Not yours, replaced by an update:
    engine/       ranks, data loading, checkpoints, evaluation, the files of a run
    trackers/     experiment trackers: their interface is in its __init__.py
    tools/        commands around the training
"""
