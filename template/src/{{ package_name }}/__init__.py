"""Distributed training with PyTorch: one command for a laptop, one node, or many.

Yours, never changed by an update:
    model.py      what is trained: networks, optimizers, loss, metrics
    data.py       the datasets
    settings.py   settings of your own
    figures.py    pictures of an evaluation

The program, from the command to the files of a run:
    __main__.py   the table of commands
    train.py      the training loop
    evaluate.py   metrics over a data set
    learner.py    the class that model.py fills in
    run_logger.py what a run writes and shows
    inference.py  use of a trained network
    torchrun.py   torchrun, with the signals and exit codes of a job

What it is made of:
    core/         what the loop stands on: ranks, loading, training, output
    tracking/     experiment trackers
    tools/        commands around the training
"""
