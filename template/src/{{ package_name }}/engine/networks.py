"""Builds, distributes, saves and restores a learner's networks and optimizers."""

import fnmatch
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from . import foreign, weights
from .config import Settings
from .errors import UsageError
from .ranks.dtensor import full_tensor, local_part
from .ranks.strategy import Units, distribute
from .ranks.world import World
from .recompute import recompute

log = logging.getLogger(__name__)


class Networks:
    """The networks of a learner by name, and their optimizers by name.

    A single network has the name `network`, and a single optimizer the name `optimizer`.

    Args:
        built: the network or networks that the learner's `build` returned, on the CPU.
        make_optimizers, units: the learner's methods `optimizers` and `fsdp_units`.

    Attributes:
        modules: the networks as they were built. Evaluations and checkpoints use them.
        wrapped: the modules that training calls instead, such as DistributedDataParallel.
        averages: the moving averages of the networks, by name; empty without the setting `ema`.
        evaluated: the averages if there are any, otherwise the modules.
        optimizers: the optimizers by name.
        not_initialized: the error if `init_from` could not be loaded. It is raised only if there
            is no checkpoint to resume from.

    Raises:
        UsageError: the learner did not return networks and optimizers, or a setting does not fit
            the networks.
    """

    def __init__(
        self,
        built: nn.Module | dict[str, nn.Module],
        make_optimizers: Callable[[Any], Optimizer | dict[str, Optimizer]],
        units: Units,
        settings: Settings,
        world: World,
    ) -> None:
        self.single = isinstance(built, nn.Module)
        self.modules: dict[str, nn.Module] = _named("build", built, "network", nn.Module)
        self.not_initialized: UsageError | None = None
        if settings.init_from:
            try:
                initialize(self.modules, settings.init_from, settings.init_partial)
            except UsageError as error:
                self.not_initialized = error
        freeze(self.modules, settings.freeze)
        self.decay = settings.ema or 0.0
        averaged = self.modules if settings.ema else {}
        self.averages = {n: deepcopy(each).requires_grad_(False) for n, each in averaged.items()}
        if settings.recompute:
            for module in self.modules.values():
                recompute(module, units(module))
        self.wrapped = {
            name: distribute(module, units, settings, world)
            for name, module in self.modules.items()
        }
        for module in self.averages.values():
            distribute(module, units, settings, world)
        self.evaluated = self.averages or self.modules
        made = make_optimizers(self.view(self.modules))
        self.optimizers: dict[str, Optimizer] = _named("optimizers", made, "optimizer", Optimizer)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        self.options = {name: _options(each) for name, each in self.optimizers.items()}

    def view(self, modules: Mapping[str, nn.Module]) -> Any:  # noqa: ANN401 - as `build` returned
        """Return modules in the form of the learner's `build`: one module, or a dictionary."""
        return modules["network"] if self.single else dict(modules)

    @torch.no_grad()
    def update_averages(self, step: int) -> None:
        """Update the averages with the parameters after a step, and copy the buffers.

        The decay is smaller in the first steps, so that the averages soon forget the initial
        parameters.
        """
        update = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        for name, average in self.averages.items():
            network = self.modules[name]
            ours, theirs = (list(map(local_part, x.parameters())) for x in (average, network))
            if ours:  # a network may have no parameters
                update(ours, theirs, step)
            for mine, buffer in zip(average.buffers(), network.buffers(), strict=True):
                mine.copy_(buffer)

    def set_learning_rates(self, factor: float) -> None:
        """Set the learning rate of each parameter group to its initial one, times a factor."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates by metric name.

        The first one is train/lr. Different ones have the name of their optimizer and the number of
        their parameter group, such as train/lr/optimizer1.
        """
        rates: dict[str, float] = {}
        for name, optimizer in self.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                if (rate := float(group["lr"])) not in rates.values():
                    rates[f"train/lr/{name}{number}" if rates else "train/lr"] = rate
        return rates

    # -- checkpoints ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the states for a checkpoint; with FSDP, the tensors are DTensors."""
        return {
            "networks": {name: each.state_dict() for name, each in self.modules.items()},
            "averages": {name: each.state_dict() for name, each in self.averages.items()},
            "optimizers": {name: each.state_dict() for name, each in self.optimizers.items()},
            "optimizer_classes": {n: type(each).__name__ for n, each in self.optimizers.items()},
            "optimizer_options": self.options,
        }

    def like(self, *key_path: Any) -> Tensor | None:  # noqa: ANN401 - names and numbers
        """Return a tensor that is distributed over the ranks as one in the `state_dict`.

        Args:
            key_path: the keys that lead to the tensor in the `state_dict`.

        Returns:
            The tensor; None if the networks and optimizers have no such tensor.
        """
        match key_path:
            case ("networks" | "averages" as part, name, key):
                modules = self.modules if part == "networks" else self.averages
                return modules[name].state_dict().get(key) if name in modules else None
            case ("optimizers", name, "state", int(number), _) if name in self.optimizers:
                groups = self.optimizers[name].param_groups
                numbered = [each for group in groups for each in group["params"]]
                return numbered[number] if number < len(numbered) else None
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        If model.py has changed an option of an optimizer since then, such as the weight decay, the
        new value counts.

        Raises:
            RuntimeError, ValueError: the state belongs to other networks or optimizers.
            KeyError, TypeError, AttributeError: the state is not one that `state_dict` returns.
        """
        for part, ours in (("networks", self.modules), ("optimizers", self.optimizers)):
            if set(ours) != set(state[part]):
                raise ValueError(
                    f"its {part} are {', '.join(state[part])}, those of model.py {', '.join(ours)}"
                )
        # If the checkpoint has no averages, they start from its networks.
        averages = state["averages"] or state["networks"]
        for name, module in self.modules.items():
            module.load_state_dict(state["networks"][name])
            if self.averages:
                self.averages[name].load_state_dict(averages[name])
        for name, optimizer in self.optimizers.items():
            saved, made = state["optimizer_classes"][name], type(optimizer).__name__
            if saved != made:
                raise ValueError(f"it has the optimizer {saved}, but model.py makes {made}")
            now, earlier = _options(optimizer), state["optimizer_options"][name]
            optimizer.load_state_dict(state["optimizers"][name])
            for group, new, old in zip(optimizer.param_groups, now, earlier, strict=True):
                group.update({key: new[key] for key in new if new[key] != old.get(key)})


def _named(method: str, made: Any, name: str, kind: type) -> dict[str, Any]:  # noqa: ANN401
    """Return the objects that a method of the learner made, by name.

    Raises:
        UsageError: they are not of this kind.
    """
    found = {name: made} if isinstance(made, kind) else made
    if not (isinstance(found, dict) and found and all(isinstance(x, kind) for x in found.values())):
        raise UsageError(
            f"{method} in model.py returned {type(made).__name__}: return one {kind.__name__}, or "
            "a dictionary of them by name"
        )
    return found


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the options of each parameter group, such as weight decay."""
    groups = optimizer.param_groups
    return [{key: each for key, each in group.items() if key != "params"} for group in groups]


def named_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """Return all parameters by name; with several networks, names begin with the network's name."""
    several = len(modules) > 1
    return {
        f"{name}.{key}" if several else key: parameter
        for name, module in modules.items()
        for key, parameter in module.named_parameters()
    }


def freeze(modules: Mapping[str, nn.Module], patterns: tuple[str, ...]) -> None:
    """Freeze the parameters whose names match patterns such as `backbone.*`.

    Raises:
        UsageError: a pattern matches no parameter.
    """
    names = named_parameters(modules)
    for pattern in patterns:
        chosen = fnmatch.filter(names, pattern)
        if not chosen:
            raise UsageError(
                f"freeze '{pattern}' matches no parameter: use names like {next(iter(names), '')}"
            )
        log.info("%d parameters are frozen by '%s'", len(chosen), pattern)
        for name in chosen:
            names[name].requires_grad_(False)


def initialize(modules: Mapping[str, nn.Module], source: str, partial: bool) -> None:
    """Load weights into networks, before the networks are distributed.

    Args:
        modules: the networks.
        source: a path that `foreign.read_weights` takes.
        partial: whether to load only the tensors whose names, shapes and kinds of dtype fit.

    Raises:
        UsageError: there is no such file, or its tensors do not fit.
    """
    if not os.path.exists(source):
        raise UsageError(
            f"init_from is {source}, but there is no such file or folder: give a run folder, a "
            "step-*.pt file, or a state_dict in a .pt or .safetensors file"
        )
    path, states = foreign.read_weights(Path(source))
    if len(states) == len(modules) == 1:
        states = dict(zip(modules, states.values(), strict=True))
    elif len(states) == 1:  # one file with the state_dict of several networks
        states = weights.by_network(next(iter(states.values())), modules) or states
    taken = 0
    for name, module in modules.items():
        mine = module.state_dict()
        theirs, lost = foreign.unwrapped(states.get(name, {}), mine)
        theirs = weights.with_tied(theirs, mine)
        fitting = {k: v for k, v in theirs.items() if k in mine and _fits(mine[k], v)}
        misfits = ", ".join(key for key in {**mine, **theirs} if key not in fitting)
        if misfits and not partial:
            raise UsageError(
                f"init_from {path} does not fit {name} at {misfits:.200}: set --init-partial to "
                "load only the tensors that fit"
            )
        module.load_state_dict(fitting, strict=False)
        taken += len(fitting)
        found = f"{len(fitting)} of {len(mine)} tensors{misfits and f', without {misfits}'}"
        found += f", whose names begin with {''.join(lost)} there" if lost else ""
        log.info("%s starts from %s: %s", name, path, found)
    if not taken:
        raise UsageError(f"init_from {path} has no tensor that fits model.py: choose another file")


def _fits(mine: Any, theirs: Any) -> bool:  # noqa: ANN401 - values of a state_dict
    """Return whether a value can replace another: tensors must match in shape and kind of dtype."""
    if not (isinstance(mine, Tensor) and isinstance(theirs, Tensor)):
        return type(mine) is type(theirs)
    if theirs.is_nested or theirs.is_meta or mine.layout != theirs.layout:
        return False
    same_kind = (
        mine.is_complex() == theirs.is_complex()
        and mine.is_floating_point() == theirs.is_floating_point()
        and mine.is_quantized == theirs.is_quantized
    )
    return same_kind and mine.shape == theirs.shape


def digest(modules: Mapping[str, nn.Module]) -> str:
    """Return the SHA-256 of all values of the state_dicts, as hex; every rank calls this."""
    found = hashlib.sha256()
    for name, module in sorted(modules.items()):
        for key, tensor in sorted(module.state_dict().items()):
            found.update(f"{name}.{key}".encode())
            if not isinstance(tensor, Tensor):  # of get_extra_state
                found.update(repr(tensor).encode())
                continue
            # Viewed as bytes, since NumPy has no bf16.
            content = full_tensor(tensor.detach()).cpu().reshape(-1)
            found.update(content.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
