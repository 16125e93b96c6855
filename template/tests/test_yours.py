"""Your model and your data fit each other and the loop: run these after each change to them."""

from collections.abc import Callable
from types import ModuleType

import torch

Package = Callable[[str], ModuleType]


def test_a_batch_goes_through_the_network_and_back(package: Package) -> None:
    datasets = package("data").load(package("config").Settings(dataset="synthetic"))
    model, sharding = package("model"), package("sharding")
    inputs, targets = next(iter(sharding.evaluation_batches(datasets.test, 8, 0, 1, 0)))
    network = model.build()
    outputs = network(inputs)
    loss = model.loss(outputs, targets, label_smoothing=0.1)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in network.parameters())
    assert 0 <= int(model.count_correct(outputs, targets)) <= len(targets)
