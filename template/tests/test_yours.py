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
    """A trainer on one CPU, before its first step."""

    trainer: Any
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
    trainer = package("train").Trainer(learner, settings, world, engine.StopRequest())
    return Yours(trainer, world)


def test_steps_have_a_finite_loss_and_train_all_that_is_not_frozen(yours: Yours) -> None:
    trainer, world = yours
    left = {
        f"{network}.{name}": parameter
        for network, module in trainer.networks.modules.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for name, parameter in left.copy().items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: left.pop(name, None))
    # Several steps, because one step may train only some of several networks.
    for _, batches in zip(range(8), trainer.loader.epoch(0, 0, 0), strict=False):
        trainer.train_step(batches, *trainer.loader.sizes(batches))
    readings = trainer.meter.read(world)
    losses = [value for name, value in readings.items() if name.endswith("loss")]
    assert losses and all(map(math.isfinite, losses))
    if not trainer.settings.find_unused_parameters:
        assert not left, "not part of a loss: use them, freeze them, or set find_unused_parameters"


def test_the_metric_that_decides_the_best_checkpoint_is_measured(yours: Yours) -> None:
    yours.trainer.evaluator.check(yours.trainer.datasets.validation, yours.trainer.datasets.test)


def test_each_sample_has_a_prediction_that_json_can_have(package: Package, yours: Yours) -> None:
    trainer, _ = yours
    _, predictions = trainer.evaluator.predict(trainer.datasets.test, 3)
    samples = package("engine").split_samples(predictions, 3)
    lines = [json.dumps(trainer.learner.describe(each)) for each in samples]
    assert len(lines) == 3


def test_a_training_ends_well_and_its_checkpoint_predicts_by_itself(
    start: Callable[..., list[subprocess.Popen]], package: Package, yours: Yours, tmp_path: Path
) -> None:
    # A whole training also runs your hooks, evaluations and figures.
    (training,) = start(1, "--max-steps=2", "--checkpoint-every=1")
    assert training.wait(timeout=5 * 60) == 0, "the error above says what to correct"
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("*2.pt")
    trained = package("learner").model_class().load(checkpoint.rename(tmp_path / checkpoint.name))
    batch, _ = yours.trainer.predict("test", 3)
    assert isinstance(trained.learner.inputs(batch), tuple), "inputs in model.py: return a tuple"
    trained.predict(batch)
