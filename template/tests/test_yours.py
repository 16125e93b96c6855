"""Your model and your data fit each other and the loop: run these after each change to them."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

Package = Callable[[str], ModuleType]
CONFIG = Path(__file__).parents[1] / "configs" / "train.yaml"


class Yours(NamedTuple):
    """What a training on one CPU begins with."""

    learner: Any
    networks: Any
    datasets: Any
    settings: Any
    world: Any


@pytest.fixture(scope="module")
def yours(package: Package) -> Yours:
    """Your learner, built as the settings in configs/train.yaml say, on the synthetic set."""
    here = {"dataset": "synthetic", "device": "cpu", "compile": False}
    settings = dataclasses.replace(package("settings").Settings.from_yaml(CONFIG), **here)
    world = package("core.ranks.world").World(
        0, 1, 0, "none", torch.device("cpu"), None, ("here",), None
    )
    torch.manual_seed(settings.seed)
    learner = package("learner").model_class()(settings)
    networks = package("core.training.networks").Networks(learner, settings, world)
    return Yours(learner, networks, package("data").load(settings), settings, world)


def test_steps_have_a_finite_loss_and_train_all_that_is_not_frozen(
    package: Package, yours: Yours
) -> None:
    learner, networks, datasets, settings, world = yours
    loading, update = package("core.loading.batches"), package("core.training.update")
    loaded = package("core.loading.steps").Loaded
    batches = loading.TrainBatches(datasets.train, 8, 0, 1, settings.seed, workers=0, pin=False)
    meter = package("core.output.metrics").Meter(world.device, learner.unit)
    loop = update.Loop(networks, settings, world, meter, lambda: None)
    left = {
        f"{network}.{name}": parameter
        for network, module in networks.modules.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    for name, parameter in left.copy().items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: left.pop(name, None))
    networks.set_learning_rates(learner.schedule(0.0))
    # A few, since a step may train only some of several networks.
    for _, (_, batch) in zip(range(8), batches.epoch(0), strict=False):
        weight = learner.weigh(batch)
        loop.begin([loaded(batch, 8, weight)], weight, measure_norm=False)
        learner.train_step(loop)
        meter.count(8, weight)
    readings, _ = meter.read(world)
    assert meter.losses and all(math.isfinite(readings[name]) for name in meter.losses)
    if not settings.find_unused_parameters:
        assert not left, "no part in a loss: use them, freeze them, or set find_unused_parameters"


def test_the_metric_that_decides_the_best_checkpoint_is_measured(
    package: Package, yours: Yours
) -> None:
    learner, networks, datasets, settings, world = yours
    package("evaluate").Evaluator(learner, networks, settings, world).check(datasets.validation)


def test_each_sample_has_a_prediction_that_json_can_have(package: Package, yours: Yours) -> None:
    learner, networks, datasets, _, world = yours
    batch = next(package("core.loading.batches").evaluation_batches(datasets.test, range(3), 3, 0))
    mode = package("evaluate").evaluation_mode
    with torch.no_grad(), mode(networks.evaluated, world):
        found = learner.predict(networks.view(networks.evaluated), batch)
    lines = [json.dumps(learner.describe(each)) for each in package("core.nested").split(found, 3)]
    assert len(lines) == 3
