"""An exponential moving average of the networks' parameters, which evaluations can use."""

from collections.abc import Mapping
from copy import deepcopy

import torch
from torch import Tensor, nn


class Average:
    """Averages of networks, on the device and with the parts of the networks themselves.

    Args:
        networks: by name, before they are distributed.
        decay: weight of the past at each step. It is less in the first steps, so that the initial
            parameters are soon forgotten.
    """

    def __init__(self, networks: Mapping[str, nn.Module], decay: float) -> None:
        self.decay = decay
        self.networks = {name: deepcopy(each) for name, each in networks.items()}
        for each in self.networks.values():
            each.requires_grad_(False)

    @torch.no_grad()
    def update(self, networks: Mapping[str, nn.Module], step: int) -> None:
        """Take in the parameters after a step; buffers, such as running statistics, are copied."""
        decay = min(self.decay, (1 + step) / (10 + step))
        for name, average in self.networks.items():
            network = networks[name]
            ours = [_local(each) for each in average.parameters()]
            theirs = [_local(each) for each in network.parameters()]
            if ours:  # a network may have buffers alone
                torch._foreach_lerp_(ours, theirs, 1 - decay)
            for mine, buffer in zip(average.buffers(), network.buffers(), strict=True):
                mine.copy_(buffer)


def _local(parameter: Tensor) -> Tensor:
    """Return this rank's part of a parameter, or all of it where it is not sharded."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
