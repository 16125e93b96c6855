"""Your model and your data fit each other and the training loop. Run this after each change."""

import dataclasses
import json
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

Package = Callable[[str], ModuleType]
CONFIG = Path(__file__).parents[1] / "configs" / "train.yaml"


class Yours(NamedTuple):
    """A training on one CPU, before its first step."""

    training: Any
    world: Any


@pytest.fixture(scope="module")
def yours(package: Package, tmp_path_factory: pytest.TempPathFactory) -> Yours:
    """Your model with the settings in configs/train.yaml, but on the synthetic dataset."""
    engine, run_dir = package("engine"), str(tmp_path_factory.mktemp("run"))
    here = {"dataset": "synthetic", "device": "cpu", "compile": False, "batch_size": 8}
    saved = package("settings").Settings.from_yaml(CONFIG)
    settings = dataclasses.replace(saved, **here, resume="never", run_dir=run_dir)
    learner = package("learner").model_class()(settings)
    world = engine.World.alone()
    datasets = package("data").load(settings)
    return Yours(engine.Training(learner, datasets, settings, world, engine.StopRequest()), world)


def test_steps_have_a_finite_loss_and_train_all_that_is_not_frozen(
    package: Package, yours: Yours
) -> None:
    training, world = yours
    left = {
        f"{network}.{name}": parameter
        for network, module in training.networks.modules.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for name, parameter in left.copy().items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: left.pop(name, None))
    # Several steps, because one step may train only some of several networks.
    for _, batches in zip(range(8), training.loader.epoch(training.position), strict=False):
        step = package("engine.epochs").Step(batches, *training.loader.sizes(batches))
        package("train").train_step(training, step)
    readings = training.meter.read(world)
    losses = [value for name, value in readings.items() if name.endswith("loss")]
    assert losses and all(map(math.isfinite, losses))
    if not training.settings.find_unused_parameters:
        assert not left, "not part of a loss: use them, freeze them, or set find_unused_parameters"


def test_the_metric_that_decides_the_best_checkpoint_is_measured(yours: Yours) -> None:
    yours.training.evaluator.check(yours.training.datasets.validation, yours.training.datasets.test)


def test_each_sample_has_a_prediction_that_json_can_have(package: Package, yours: Yours) -> None:
    training, _ = yours
    _, predictions = training.evaluator.predict(training.datasets.test, 3)
    samples = package("engine").split_samples(predictions, 3)
    lines = [json.dumps(training.learner.describe(each)) for each in samples]
    assert len(lines) == 3


def test_a_training_ends_well_and_its_checkpoint_predicts_by_itself(
    start: Callable[..., list[subprocess.Popen]], package: Package, yours: Yours, tmp_path: Path
) -> None:
    # A whole training also runs your hooks, evaluations and figures.
    (training,) = start(1, "--max-steps=2", "--checkpoint-every=1")
    assert training.wait(timeout=5 * 60) == 0, "the error above says what to correct"
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("*2.pt")
    trained = package("learner").model_class().load(checkpoint.rename(tmp_path / checkpoint.name))
    batch, _ = yours.training.predict("test", 3)
    assert isinstance(trained.learner.inputs(batch), tuple), "inputs in model.py: return a tuple"
    trained.predict(batch)
