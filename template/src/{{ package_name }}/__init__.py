"""Distributed training with PyTorch: the same command on a laptop, on one node, and on many nodes.

Your files, which an update never changes:
    model.py      what is trained: networks, optimizers, loss, metrics
    data.py       the datasets
    settings.py   settings of your own
    figures.py    figures that are drawn at the end of a run

The program, where an update merges its changes with yours:
    train.py      the training loop, validation, a stop by a signal, the end of a run
    learner.py    the base class of `Model` in model.py
    __main__.py   the commands

The engine, which an update replaces:
    engine/       ranks, data loading, checkpoints, evaluation, the files of a run
    plugins/      what a training does besides, such as measuring what it costs
    trackers/     experiment trackers; __init__.py has their interface
    tools/        the other commands
"""
